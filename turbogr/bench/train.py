"""Whole training steps, optimiser included: tokens/s, MFU and peak memory against plain PyTorch and RecTools.

Claim: training is many times faster than with plain PyTorch operators and than RecTools, in less memory.
Compared with: our reference operators (plain PyTorch) and RecTools' HSTUModel on the same lengths.
Keys, for case C: `C_tokens_per_second`, `C_mfu_strict`, `C_mfu_nominal`, `C_peak_memory_bytes`; `ml1m` and `d256` also
`C_reference_tokens_per_second`, `C_reference_peak_memory_bytes`, `C_vs_reference`; `ml1m_rectools_tokens_per_second`,
`ml1m_vs_rectools`, and with freed memory kept for RecTools too, as we do for ourselves:
`ml1m_rectools_kept_tokens_per_second`, `ml1m_vs_rectools_kept`; `C_bf16_speedup` and `C_bf16_activation_saving`, what
`train.precision=bf16` makes of the tokens/s and of the bytes that a forward leaves for its backward; `fma_peak_gflops`,
`gemm_library_gflops` (also as `gemm_peak_gflops`).

Cases: `ml1m` (HSTU at d = 50, 2 blocks, one head, lengths as in MovieLens-1M), `d256` (4 blocks, 4 heads of 64,
lengths up to 1024), and the paper's presets with the lengths of KuaiRand-27K. Each runs in its own process. MFU is a
share of the processor's fp32 peak, measured in the same run by fused multiply-adds; a record without `fma_peak_gflops`
used the rate of PyTorch's matrix product instead. RecTools needs its own environment; give its interpreter with
`--set rectools_python=PATH`, otherwise that comparison is left out.

A step of the largest presets takes more than a minute on two cores, so cases can be measured one by one:
`--set cases=fuxi_long --set merge=FILE --json FILE` keeps the figures of the other cases that FILE, if it exists, has.
FILE must be of the same machine and versions.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from turbogr.bench._children import failure
from turbogr.bench._journal import CaseFailed, measured
from turbogr.bench._paper_models import PAPER_CASES, paper_model
from turbogr.bench._training import Case, measure_in_child
from turbogr.bench.record import Cell, Record, Result, Table
from turbogr.errors import UserError, did_you_mean
from turbogr.machine import machine_facts, versions
from turbogr.peak import Peak, measure_peak
from turbogr.plot import Axis, bar_chart, grouped_bar_chart, percent

CASES = ("ml1m", "d256", *PAPER_CASES)

# MFU of the paper's table 1 on its own hardware, by the formula of our `mfu_nominal`.
PAPER_MFU = dict(
    zip(
        PAPER_CASES,
        (0.0043, 0.0196, 0.0800, 0.2474, 0.3408, 0.0088, 0.0378, 0.1676, 0.3934, 0.5471),
        strict=True,
    )
)

SETTINGS: dict[str, Any] = {
    "cases": list(CASES),
    "seconds": 15.0,  # of measured steps per case, at least one step, after a warm-up step
    "reference": True,  # also measure ml1m and d256 on the reference operators
    "rectools_python": "",  # interpreter of an environment with rectools[torch]==0.19.0
    "threads": 0,  # 0: as many as torch uses
    "gemm": "auto",  # which library computes large products; see train.gemm
    "bf16": True,  # also measure every case in bf16
    "profile": True,  # also time steps by operator
    "merge": "",  # an earlier record of this benchmark whose figures of other cases are kept
}

_PRESET_BATCH = {"tiny": 8, "small": 4, "medium": 2, "large": 1, "long": 1}
_RIVALS = {
    "reference": "our reference operators",
    "rectools": "RecTools HSTUModel",
    "rectools_kept": "RecTools HSTUModel, freed memory kept",
}


def run(settings: Mapping[str, Any]) -> Result:
    """Measure `cases`.

    Raises:
        UserError: an unknown case, none that could be measured, or a record to merge that is of another benchmark,
            machine or version, or has another definition of MFU.
    """
    for name in settings["cases"]:
        if name not in CASES:
            raise UserError(f"cases: unknown '{name}', choose from {', '.join(CASES)}.{did_you_mean(name, CASES)}")
    figures = _earlier_figures(settings)
    threads = settings["threads"] or torch.get_num_threads()
    peak = Peak(*measured("peak", lambda: dataclasses.astuple(measure_peak(torch.float32, threads))))
    figures["gemm_library_gflops"] = figures["gemm_peak_gflops"] = peak.gemm / 1e9
    if peak.fma is not None:
        figures["fma_peak_gflops"] = peak.fma / 1e9
    notes: list[str] = []
    profiles: dict[str, dict[str, float]] = {}
    for name in settings["cases"]:
        try:
            found, profile = _measure(name, threads, peak.flops, settings, notes)
        except CaseFailed as error:
            notes.append(str(error))
            continue
        figures.update(found)
        if settings["profile"]:
            profiles[name] = profile
    if not _measured_cases(figures):
        raise UserError("; ".join(notes))
    rates = f"peak {peak.flops / 1e9:.0f}, matrix product {peak.gemm / 1e9:.0f} GFLOP/s"
    title = f"Training steps, {threads} threads, {rates}"
    tables = [_table(title, figures), *(_profile_table(name, profile) for name, profile in profiles.items())]
    return Result(figures, tables, _plots(figures, profiles), notes)


def _measure(
    name: str, threads: int, peak: float, settings: Mapping[str, Any], notes: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of a case and its profile; add notes on what is not compared."""
    case = dataclasses.replace(
        _case(name), seconds=settings["seconds"], threads=threads, profile=settings["profile"], gemm=settings["gemm"]
    )
    ours = measured(name, lambda: measure_in_child(case))
    speed = ours["tokens_per_second"]
    figures = {
        f"{name}_tokens_per_second": speed,
        f"{name}_mfu_strict": ours["strict_flops_per_second"] / peak,
        f"{name}_mfu_nominal": ours["nominal_flops_per_second"] / peak,
        f"{name}_peak_memory_bytes": ours["peak_memory_bytes"],
    }
    if name in ("ml1m", "d256") and settings["reference"]:
        reference = dataclasses.replace(case, backend="reference", profile=False)
        slow = measured(f"{name}, {_RIVALS['reference']}", lambda: measure_in_child(reference))
        figures[f"{name}_reference_tokens_per_second"] = slow["tokens_per_second"]
        figures[f"{name}_reference_peak_memory_bytes"] = slow["peak_memory_bytes"]
        figures[f"{name}_vs_reference"] = speed / slow["tokens_per_second"]
    if settings["bf16"]:
        narrow = dataclasses.replace(case, precision="bf16", profile=False)
        half = measured(f"{name}, bf16", lambda: measure_in_child(narrow))
        figures[f"{name}_bf16_speedup"] = half["tokens_per_second"] / speed
        figures[f"{name}_bf16_activation_saving"] = 1 - half["activation_bytes"] / ours["activation_bytes"]
    if name == "ml1m":
        if not settings["rectools_python"]:
            notes.append("RecTools was not compared: give its interpreter with --set rectools_python=PATH")
        for rival, kept in (("rectools", False), ("rectools_kept", True)) if settings["rectools_python"] else ():
            theirs = _rectools(settings, notes, rival, kept)
            if theirs is not None:
                figures[f"ml1m_{rival}_tokens_per_second"] = theirs
                figures[f"ml1m_vs_{rival}"] = speed / theirs
    return figures, ours.get("profile", {})


def _earlier_figures(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the record to merge whose cases are not measured now."""
    path = settings["merge"]
    if not path or not Path(path).exists():
        return {}
    record = Record.read(path)
    for what, theirs, ours in (
        ("benchmark", record.name, "train"),
        ("machine", record.machine, machine_facts()),
        ("versions", record.versions, versions()),
    ):
        if theirs != ours:
            raise UserError(f"merge={path}: this record has another {what} ({theirs}, not {ours}); measure all again")
    if "gemm_peak_gflops" in record.figures and "gemm_library_gflops" not in record.figures:
        raise UserError(
            f"merge={path}: in this record MFU is a share of the matrix product's rate, not of the processor's peak as "
            "now; measure all again"
        )
    kept = [f"{case}_" for case in CASES if case not in settings["cases"]]
    return {key: value for key, value in record.figures.items() if key.startswith(tuple(kept))}


def _case(name: str) -> Case:
    if name == "ml1m":
        model = {"dim": 50, "num_blocks": 2, "num_heads": 1, "max_len": 200, "dropout": 0.2}
        return Case(model, num_items=3706, batch_size=128, median_length=96, sigma=1.11, shortest=18)
    if name == "d256":
        model = {"dim": 256, "num_blocks": 4, "num_heads": 4, "max_len": 1024, "dropout": 0.2}
        return Case(model, num_items=20_000, batch_size=16, median_length=320, sigma=0.8, shortest=5)
    model_name, size = paper_model(name)
    preset: dict[str, Any] = {"name": model_name, "preset": size, "dropout": 0.5}
    return Case(preset, num_items=100_000, batch_size=_PRESET_BATCH[size], median_length=8591, sigma=0.796, shortest=5)


def _measured_cases(figures: Mapping[str, float]) -> list[str]:
    return [name for name in CASES if f"{name}_tokens_per_second" in figures]


def _table(title: str, figures: Mapping[str, float]) -> Table:
    rows: list[list[Cell]] = []
    for name in _measured_cases(figures):
        rows.append(
            [
                name,
                figures[f"{name}_tokens_per_second"],
                figures[f"{name}_mfu_strict"],
                figures[f"{name}_mfu_nominal"],
                PAPER_MFU.get(name),
                figures[f"{name}_peak_memory_bytes"] / 2**20,
            ]
        )
        for rival, label in _RIVALS.items():
            if f"{name}_{rival}_tokens_per_second" in figures:
                memory = figures.get(f"{name}_{rival}_peak_memory_bytes")
                speed = figures[f"{name}_{rival}_tokens_per_second"]
                rows.append([f"{name}, {label}", speed, None, None, None, memory and memory / 2**20])
    columns = ["case", "tokens/s", "MFU strict", "MFU nominal", "paper's MFU", "peak MiB above idle"]
    return Table(title, columns, rows)


def _profile_table(name: str, profile: Mapping[str, float]) -> Table:
    total = sum(profile.values())
    rows: list[list[Cell]] = [[key, value, value / total] for key, value in profile.items()]
    return Table(f"Where a step of {name} spends its time", ["operator", "ms", "share"], rows)


def _plots(figures: Mapping[str, float], profiles: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    cases = _measured_cases(figures)
    shares = {
        "strict": [figures[f"{name}_mfu_strict"] for name in cases],
        "nominal": [figures[f"{name}_mfu_nominal"] for name in cases],
    }
    if any(name in PAPER_MFU for name in cases):
        shares["the paper's, nominal"] = [PAPER_MFU.get(name, float("nan")) for name in cases]
    plots = {
        "mfu": grouped_bar_chart(
            cases,
            shares,
            title="Model FLOPs utilisation",
            y=Axis("share of the peak", zero=True, format=percent),
            width=max(560, 90 * len(cases)),
        )
    }
    for name in ("ml1m", "d256"):
        if name in cases:
            speeds = {"TurboGR": figures[f"{name}_tokens_per_second"]}
            for rival, label in _RIVALS.items():
                if f"{name}_{rival}_tokens_per_second" in figures:
                    speeds[label] = figures[f"{name}_{rival}_tokens_per_second"]
            plots[name] = bar_chart(speeds, title=f"Training steps, {name}", axis=Axis("tokens/s", zero=True))
    for name, profile in profiles.items():
        total = sum(profile.values())
        plots[f"profile-{name}"] = bar_chart(
            {key.replace("_", " "): value / total for key, value in profile.items()},
            title=f"Where a step of {name} spends its time ({total:,.0f} ms)",
            axis=Axis("share of a step", zero=True, format=percent),
            row_height=24,
        )
    return plots


def _rectools(settings: Mapping[str, Any], notes: list[str], rival: str, kept: bool) -> float | None:
    """Return the tokens/s of RecTools' HSTUModel on the lengths of ml1m, or None and add a note that says why.

    With `kept` its process keeps freed memory for its next tensors, as ours does.
    """
    python = settings["rectools_python"]
    script = Path(__file__).with_name("_rectools.py")
    case = dataclasses.asdict(_case("ml1m")) | {"threads": settings["threads"], "keep_freed_memory": kept}

    def work() -> Any:
        request = json.dumps(case)
        done = subprocess.run([python, str(script)], input=request, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise failure(done.stderr, done.returncode)
        return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]

    try:
        return float(measured(f"ml1m, {_RIVALS[rival]}", work))
    except CaseFailed as error:
        notes.append(str(error))
        return None
