"""Table 1 of the paper: utilisation, throughput and scalability of the ten presets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from turbogr.bench._journal import CaseFailed, measured
from turbogr.bench._paper_models import PAPER_CASES, paper_model
from turbogr.bench._paper_rows import BATCH_SIZES, FILL, Part, Row, filled_lengths
from turbogr.bench._ranks import run_as_ranks
from turbogr.bench._training import Case, measure_in_child
from turbogr.bench.record import Cell, Table
from turbogr.config import PRESETS, ModelConfig
from turbogr.models.flops import nominal_flops, strict_flops
from turbogr.peak import measure_peak

SAMPLES = dict(zip(PAPER_CASES, (3475, 3509, 2896, 1617, 771, 3441, 3218, 2812, 1156, 574), strict=True))
MFU = dict(
    zip(PAPER_CASES, (0.0043, 0.0196, 0.08, 0.2474, 0.3408, 0.0088, 0.0378, 0.1676, 0.3934, 0.5471), strict=True)
)
SCALABILITY = dict(zip(PAPER_CASES, (0.38, 0.58, 0.70, 0.93, 0.97, 0.35, 0.50, 0.74, 0.94, 0.97), strict=True))
NUM_NEGATIVES = 128
_ITEMS = 100_000
_RANK = "turbogr.bench._scaling_rank"
_PAPER_RANKS = "32 to 128 Ascend 910B1; the paper prints no formula, this one fits all its rows"


def peak_flops(threads: int) -> float:
    """The FLOP/s that the processor computes at most with `threads` threads, measured once per record."""
    return float(measured(f"peak of {threads} threads", lambda: measure_peak(torch.float32, threads).flops))


def table1(settings: Mapping[str, Any], part: Part) -> None:
    """Two ranks with communication, the paper's batch sizes, sequences as full as the paper's."""
    peak = peak_flops(2)
    rows: list[list[Cell]] = []
    for name in settings["presets"]:
        try:
            rows.append(_preset(name, peak, settings, part))
        except CaseFailed as error:
            part.notes.append(f"{name} is left out: {error}")
    columns = [
        "preset",
        "sequences",
        "samples/s",
        "strict MFU",
        "nominal",
        "paper",
        "scalability",
        "paper",
        "1 process",
    ]
    part.tables.append(Table("Two ranks, communication included", columns, rows))


def _preset(name: str, peak: float, settings: Mapping[str, Any], part: Part) -> list[Cell]:
    model_name, size = paper_model(name)
    model = ModelConfig(name=model_name, preset=size, dropout=0.5)  # type: ignore[arg-type]
    batch, max_len = BATCH_SIZES[size], PRESETS[size]["max_len"]
    lengths = filled_lengths(batch, max_len)
    options = {"seconds": settings["seconds"], "max_steps": 20, "num_items": _ITEMS, "num_negatives": NUM_NEGATIVES}
    options |= {"model": model_name, "preset": size, "lengths": lengths.tolist()}
    seconds = {}
    for ranks in (1, 2):
        found = measured(f"{name} on {ranks} ranks", partial(run_as_ranks, _RANK, ranks, options))
        seconds[ranks] = found["seconds"]
    flops = strict_flops(model, torch.from_numpy(lengths), NUM_NEGATIVES)
    strict = 2 * flops / seconds[2] / peak
    nominal = 2 * nominal_flops(model, batch) / seconds[2] / peak
    scalability = seconds[1] / seconds[2]
    full = None
    if not settings["quick"]:
        full = _one_process(name, model_name, size, max_len, batch, settings) / peak
        part.figures[f"table1_{name}_mfu_one_process_full"] = full
    samples = 2 * batch / seconds[2]
    again = ("sections=table1", f"presets={name}")
    where = f"2 ranks with a core each, {batch} sequences each, {100 * FILL:.1f} % full at {max_len:,}"
    claim = f"Model FLOPs utilisation of {name}"
    part.add(
        Row(f"table1_{name}_mfu", f"{claim}, real tokens and the causal half alone", None,
            "the paper counts padding and the masked half too", strict, f"{where}; share of the fused multiply-adds",
            "higher", "measured", again)
    )  # fmt: skip
    part.add(
        Row(f"table1_{name}_mfu_nominal", f"{claim}, by the paper's formula", MFU[name], _PAPER_RANKS, nominal,
            f"{where}; share of the fused multiply-adds", "higher", "measured", again)
    )  # fmt: skip
    part.add(
        Row(f"table1_{name}_scalability", f"Linear scalability of {name}", SCALABILITY[name],
            "128 NPUs against fewer of them", scalability,
            "2 ranks against 1 on one machine, the same work for each: not the paper's number of devices", "higher",
            "measured", again)
    )  # fmt: skip
    part.figures[f"table1_{name}_samples_per_second"] = samples
    return [name, batch, samples, strict, nominal, MFU[name], scalability, SCALABILITY[name], full]


def _one_process(name: str, model: str, size: str, max_len: int, batch: int, settings: Mapping[str, Any]) -> float:
    """Return the strict FLOP/s of one process with all threads, on full sequences."""
    case = Case(
        {"name": model, "preset": size, "dropout": 0.5}, _ITEMS, batch, 4.0 * max_len, 0.0, threads=2,
        num_negatives=NUM_NEGATIVES, seconds=settings["seconds"],
    )  # fmt: skip
    return float(measured(f"{name}, one process, full", lambda: measure_in_child(case))["strict_flops_per_second"])
