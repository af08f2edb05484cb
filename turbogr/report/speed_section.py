"""The section about speed: throughput, utilisation, waiting times, and the operators and threads of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from turbogr.plot import Axis, bar_chart, percent, thinned
from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.section import Figure, Section, line_figure
from turbogr.report.timeline_figure import timeline_figure
from turbogr.training.stragglers import describe_stragglers

_MOST_REPORTS = 5
_WAITS = {
    "exposed_sparse_share": "embedding rows and their gradients",
    "exposed_dense_share": "other ranks",
    "idle_share": "the next batch",
}


def speed(run: RunData) -> Section:
    """Tokens per second and model FLOPs utilisation over time, and what the time of a step is spent on."""
    figures = []
    clock = wording.column(run.training, "elapsed")
    rising = len(clock) > 1 and all(a < b for a, b in pairwise(clock))
    xs = clock if rising else wording.column(run.training, "step")
    x = Axis("seconds of training" if rising else "step")
    tokens = wording.column(run.training, "tokens_per_second")
    if any(math.isfinite(value) for value in tokens):
        curve = thinned("tokens/s", xs, tokens)
        figures.append(line_figure([curve], "Throughput", x, Axis("tokens per second", zero=True)))
    strict = _utilisation(run, "mfu_strict", "Model FLOPs utilisation", xs, x)
    figures += strict
    columns = {name: wording.column(run.training, key) for key, name in _WAITS.items()}
    waits = [thinned(name, xs, column) for name, column in columns.items() if any(value > 0 for value in column)]
    if waits:
        axis = Axis("share of a step", format=percent, zero=True)
        figures.append(line_figure(waits, "What a step waits for", x, axis, caption=_staleness(run)))
    if run.profile:
        figures.append(profile_figure(run.profile))
    if run.spans:
        figures.append(timeline_figure(run.spans))
    peak = wording.number(run.part("machine").get("peak_flops" if _by_fma(run) else "gemm_peak_flops"))
    context: dict[str, Any] = {
        "figures": figures,
        "notes": _slow_ranks(run),
        "missing": "" if figures else "This run has recorded no speed yet.",
        "peak": f"{peak / 1e9:,.0f} GFLOP/s" if math.isfinite(peak) else None,
        "by_fma": _by_fma(run),
        "device_precision": _device_precision(run),
        "has_mfu": bool(strict),
        "nominal": _utilisation(run, "mfu_nominal", "Nominal model FLOPs utilisation", xs, x),
    }
    return Section("speed", "Speed", "speed.html", context)


def _device_precision(run: RunData) -> str | None:
    """The precision of an accelerator's peak; None of a CPU."""
    machine = run.part("machine")
    if str(machine.get("device", "cpu")).startswith("cpu"):
        return None
    return str(machine.get("peak_precision", "fp32")).upper().replace("BF", "bf").replace("FP", "fp")


def _utilisation(run: RunData, key: str, title: str, xs: list[float], x: Axis) -> list[Figure]:
    """Draw one kind of MFU over time; nothing where it was not measured."""
    column = wording.column(run.training, key)
    if not any(map(math.isfinite, column)):
        return []
    axis = Axis("share of the peak" if _by_fma(run) else "share of the GEMM peak", format=percent, zero=True)
    return [line_figure([thinned("utilisation", xs, column)], title, x, axis)]


def _by_fma(run: RunData) -> bool:
    """Whether the run's MFU is a share of the processor's peak; in older runs it is one of the library's product."""
    return "peak_flops" in run.part("machine")


def _slow_ranks(run: RunData) -> list[str]:
    """Say which ranks were slower than planned, from which step on."""
    return [sentence for record in run.stragglers[-_MOST_REPORTS:] if (sentence := describe_stragglers(record))]


def _staleness(run: RunData) -> str:
    """Return how many rows two batches share and how stale rows were, for a run that read rows ahead."""
    rates = [rate for rate in wording.column(run.training, "collision_rate") if math.isfinite(rate)]
    if not rates:
        return ""
    stale = max((value for value in wording.column(run.training, "staleness") if math.isfinite(value)), default=0.0)
    mean = sum(rates) / len(rates)
    return f"{percent(mean)} of a batch's rows were also in the batch before; rows were up to {stale:g} updates old."


def profile_figure(milliseconds: Mapping[str, float]) -> Figure:
    """Draw the shares of a step's time by operator; the caption says how long the step took."""
    total = sum(milliseconds.values())
    shares = {name.replace("_", " "): value / total for name, value in milliseconds.items()}
    axis = Axis("share of a step", format=wording.share, zero=True)
    return Figure.draw(
        lambda width: bar_chart(shares, title="Time of a step by operator", axis=axis, width=width, row_height=24),
        f"Mean of a few early steps of {total:,.0f} ms. An operator's time includes its matrix products.",
    )
