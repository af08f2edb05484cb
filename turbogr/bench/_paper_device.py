"""Table 6 of the paper: the share of a step in which a device computes, with a simulated device.

Where two processes train on two cores, communication takes time from computing, which an accelerator's does not. So
the time that one process computes with nobody beside it is recorded first; then, in the job, that time passes on a
simulated device (the process sleeps, block by block) and the cores are free for communication, which is real. The share
of useful computing is the recorded time ÷ the time of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from turbogr.bench._journal import measured
from turbogr.bench._paper_models import paper_model
from turbogr.bench._paper_rows import BATCH_SIZES, FILL, Part, Row, filled_lengths
from turbogr.bench._ranks import run_as_ranks
from turbogr.bench.record import Cell, Table
from turbogr.config import PRESETS

_RANK = "turbogr.bench._paper_device_rank"
_PAPER = {"fuxi_large": 0.9425, "fuxi_long": 0.9429}
_MODES = ("serial", "semi_async", "exact_overlap")
_NUM_ITEMS = 20_000


def table6(settings: Mapping[str, Any], part: Part) -> None:
    """Record the computing of a step of each model alone, then train with a device that takes as long."""
    steps = 2 if settings["quick"] else 6
    rows: list[list[Cell]] = []
    for case, paper in _PAPER.items():
        model, preset = paper_model(case)
        lengths = filled_lengths(BATCH_SIZES[preset], PRESETS[preset]["max_len"])
        options = {"model": model, "preset": preset, "lengths": lengths.tolist(), "num_items": _NUM_ITEMS,
                   "num_negatives": 32, "steps": steps}  # fmt: skip
        alone = measured(f"{case} alone", partial(run_as_ranks, _RANK, 1, {**options, "seconds": None}))["seconds"]
        useful = {}
        for mode in _MODES:
            job = {**options, "seconds": alone, "mode": mode}
            step = measured(f"{case}, {mode}", partial(run_as_ranks, _RANK, 2, job))["seconds"]
            useful[mode] = alone / step
            rows.append([case, mode, alone, step, useful[mode], paper])
            part.figures[f"table6_useful_computing_{case}_{mode}"] = useful[mode]
        part.add(
            Row(f"table6_useful_computing_{case}", f"Share of a step in which the device computes, {case}", paper,
                "of 128 NPUs' time, six-stage pipeline, semi-asynchronous", useful["semi_async"],
                f"2 ranks over loopback, {len(lengths)} sequence(s) each, {100 * FILL:.1f} % full, 32 negatives, a "
                f"simulated device that takes as long as one core of this machine ({alone:.3g} s): far slower than an "
                f"NPU, so there is more to hide behind; serial {100 * useful['serial']:.1f} %", "higher", "emulated",
                ("sections=table6",))
        )  # fmt: skip
    columns = ["model", "mode", "computing s", "step s", "useful", "paper"]
    part.tables.append(Table("A simulated device, real communication", columns, rows))
