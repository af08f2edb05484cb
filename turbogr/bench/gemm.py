"""GEMM peak of this machine in every precision: the 100 % of MFU.

Claim: none; a fact about the machine.
Compared with: nothing; the rate of the fastest of several large square matrix products.
Keys: `gflops_<precision>`. A precision that this machine cannot compute has none; it is tried in a child process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError, did_you_mean
from turbogr.machine import GemmUnavailable, gemm_peak
from turbogr.plot import Axis, bar_chart

SETTINGS: dict[str, Any] = {
    "precisions": ["float32", "float64", "bfloat16", "float16"],
    "threads": 0,  # 0: as many as torch uses
    "timeout": 60.0,
}

_KNOWN = ("float64", "float32", "bfloat16", "float16")


def run(settings: Mapping[str, Any]) -> Result:
    """Measure the peak in each of `precisions`."""
    for precision in settings["precisions"]:
        if precision not in _KNOWN:
            hint = did_you_mean(precision, _KNOWN)
            raise UserError(f"precisions: unknown '{precision}', choose from {', '.join(_KNOWN)}.{hint}")
    if settings["threads"] < 0:
        raise UserError(f"threads must be 0 (all) or positive, got {settings['threads']}")
    threads = settings["threads"] or torch.get_num_threads()
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    notes = []
    for precision in settings["precisions"]:
        rate: float | None = None
        try:
            rate = gemm_peak(getattr(torch, precision), threads, settings["timeout"]) / 1e9
            figures[f"gflops_{precision}"] = rate
        except GemmUnavailable as error:
            notes.append(f"{precision} is not available on this machine: {error}")
        rows.append([precision, rate])
    title = f"GEMM peak, {threads} thread{'s' if threads > 1 else ''}"
    plot = bar_chart(
        {precision: figures.get(f"gflops_{precision}", float("nan")) for precision in settings["precisions"]},
        title=title,
        axis=Axis("GFLOP/s, best of several square products", zero=True),
    )
    return Result(figures, [Table(title, ["precision", "GFLOP/s"], rows)], {"gemm": plot}, notes)
