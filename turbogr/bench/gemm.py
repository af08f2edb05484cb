"""What this machine computes at most in every precision (the 100 % of MFU), and in PyTorch's matrix product.

Claim: none; a fact about the machine.
Compared with: nothing; fused multiply-adds that touch no memory, and the fastest of several large square matrix
products.
Keys: `fma_gflops_<precision>` (float32, bfloat16), `gflops_<precision>` of the matrix product. A precision that this
machine cannot compute has none; it is tried in a child process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError, did_you_mean
from turbogr.machine import GemmUnavailable, gemm_peak
from turbogr.peak import PeakUnavailable, fma_peak
from turbogr.plot import Axis, grouped_bar_chart

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
        dtype = getattr(torch, precision)
        try:
            figures[f"gflops_{precision}"] = gemm_peak(dtype, threads, settings["timeout"]) / 1e9
        except GemmUnavailable as error:
            notes.append(f"{precision} is not available on this machine: {error}")
        try:
            figures[f"fma_gflops_{precision}"] = fma_peak(dtype, threads) / 1e9
        except PeakUnavailable as error:
            notes.append(f"the peak of {precision} was not measured: {error}")
        rows.append([precision, figures.get(f"fma_gflops_{precision}"), figures.get(f"gflops_{precision}")])
    title = f"Peak, {threads} thread{'s' if threads > 1 else ''}"
    kinds = {"fused multiply-adds": "fma_gflops_", "matrix product": "gflops_"}
    plot = grouped_bar_chart(
        settings["precisions"],
        {
            kind: [figures.get(prefix + precision, float("nan")) for precision in settings["precisions"]]
            for kind, prefix in kinds.items()
        },
        title=title,
        y=Axis("GFLOP/s", zero=True),
    )
    columns = ["precision", "fused multiply-adds, GFLOP/s", "matrix product, GFLOP/s"]
    return Result(figures, [Table(title, columns, rows)], {"gemm": plot}, notes)
