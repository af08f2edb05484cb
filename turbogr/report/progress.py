"""The sections about how the run went: what it learned over time, and how fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from turbogr.report import wording
from turbogr.report.charts import Axis, Mark, Series, bar_chart, line_chart, percent
from turbogr.report.quality import metric_label, metric_order
from turbogr.report.run import Record, Run
from turbogr.report.section import Figure, Section, thinned
from turbogr.report.timeline import timeline_figure

_WAITS = {
    "exposed_sparse_share": "item vectors and their gradients",
    "exposed_dense_share": "other ranks",
    "idle_share": "the next batch",
}


_PARTS = "Gradient norm, ranks beside each other"


def learning(run: Run) -> Section:
    """Loss, metrics over epochs with the best one marked, gradient norm and learning rate."""
    figures = [_loss(run)] if run.train else []
    parts = sorted({str(record.get("part", "")) for record in run.evals})
    figures.extend(_metric_curves(run, part) for part in parts)
    for key, title in (("grad_norm", "Gradient norm"), ("grad_norm_of_parts", _PARTS), ("lr", "Learning rate")):
        values = _column(run.train, key)
        finite = {value for value in values if math.isfinite(value)}
        if len(finite) > 1:
            curve = thinned(title, _column(run.train, "step"), values)
            figures.append(_figure([curve], title, Axis("step"), Axis(zero=key == "lr")))
    return Section("learning", "Learning", "figures.html", {"figures": figures, "missing": _missing(run)})


def _missing(run: Run) -> str:
    if not run.train and not run.evals:
        return "This run has recorded neither training steps nor evaluations yet."
    if not run.train:
        return "This run has recorded no training steps."
    return "" if run.evals else "The model has not been evaluated during this run yet."


def _loss(run: Run) -> Figure:
    curve = thinned("loss", _column(run.train, "step"), _column(run.train, "loss"))
    skipped = sum(1 for value in _column(run.train, "loss") if not math.isfinite(value))
    caption = f"{skipped} recorded losses were not finite and are left out." if skipped else ""
    if curve.low is not None:
        caption = f"Mean of neighbouring records; the band spans their lowest and highest. {caption}".strip()
    return _figure([curve], "Training loss", Axis("step"), Axis("sampled softmax"), caption=caption)


def _metric_curves(run: Run, part: str) -> Figure:
    records = [record for record in run.evals if str(record.get("part", "")) == part]
    keys = sorted({key for record in records for key in record if "@" in key or key == "mrr"}, key=metric_order)
    chosen = _worth_drawing(keys, _selecting_metric(run))
    epochs = _column(records, "epoch")
    by_epoch = all(math.isfinite(epoch) for epoch in epochs)
    xs = epochs if by_epoch else _column(records, "step")
    series = [Series(metric_label(key), xs, _column(records, key)) for key in chosen]
    marks, caption = _best(run, records, xs, chosen, "epoch" if by_epoch else "step")
    left_out = [key for key in keys if key not in chosen]
    if left_out:
        caption += f" Not drawn: {', '.join(metric_label(key) for key in left_out)}."
    title = {"valid": "Validation metrics", "test": "Test metrics"}.get(part, f"Metrics, {part}")
    x = Axis("epoch", integer=True) if by_epoch else Axis("step")
    return _figure(series, title, x, Axis(format=percent, zero=True), marks, caption.strip())


def _selecting_metric(run: Run) -> str:
    return str(run.setting("evaluate", "metric") or "hr@10")


def _worth_drawing(keys: list[str], selecting: str) -> list[str]:
    """Return up to five metrics that tell the story: hit rates, one NDCG and the metric that selects."""
    first_ndcg = next((key for key in keys if key.startswith("ndcg@")), None)
    wanted = [key for key in keys if key.startswith("hr@") or key in (first_ndcg, selecting)]
    spare = max(0, len(wanted) - 5)
    dispensable = [key for key in reversed(wanted) if key != selecting][:spare]
    return [key for key in wanted if key not in dispensable] or keys[:5]


def _best(run: Run, records: list[Record], xs: list[float], drawn: list[str], unit: str) -> tuple[list[Mark], str]:
    """Mark the evaluation at which the selecting metric was highest."""
    metric = _selecting_metric(run)
    values = _column(records, metric)
    finite = [place for place, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return [], ""
    best = max(finite, key=lambda place: values[place])
    words = f"best {metric_label(metric)}, {unit} {xs[best]:g}"
    marks = [Mark(xs[best], values[best], words, drawn.index(metric))] if metric in drawn else []
    return marks, f"Highest {metric_label(metric)}: {values[best]:.4f} at {unit} {xs[best]:g}."


def speed(run: Run) -> Section:
    """Tokens a second and model FLOPs utilisation over time, and where the time of a step goes."""
    figures = []
    clock = _column(run.train, "elapsed")
    steady = len(clock) > 1 and all(a < b for a, b in pairwise(clock))
    xs = clock if steady else _column(run.train, "step")
    x = Axis("seconds of training" if steady else "step")
    tokens = _column(run.train, "tokens_per_second")
    if any(math.isfinite(value) for value in tokens):
        curve = thinned("tokens/s", xs, tokens)
        figures.append(_figure([curve], "Throughput", x, Axis("tokens per second", zero=True)))
    shares = [
        thinned(name, xs, _column(run.train, key))
        for key, name in (("mfu_strict", "strict"), ("mfu_nominal", "nominal"))
        if any(math.isfinite(value) for value in _column(run.train, key))
    ]
    peak = wording.number(run.part("machine").get("gemm_peak_flops"))
    if shares:
        figures.append(
            _figure(shares, "Model FLOPs utilisation", x, Axis("share of the GEMM peak", format=percent, zero=True))
        )
    waits = [
        thinned(name, xs, _column(run.train, key))
        for key, name in _WAITS.items()
        if any(value > 0.0 for value in _column(run.train, key))
    ]
    if waits:
        axis = Axis("share of a step", format=percent, zero=True)
        figures.append(_figure(waits, "What a step waits for", x, axis, caption=_overlap_caption(run)))
    if run.profile:
        figures.append(profile_figure(run.profile))
    if run.spans:
        figures.append(timeline_figure(run.spans))
    context: dict[str, Any] = {
        "figures": figures,
        "missing": "" if figures else "This run has recorded no speed yet.",
        "peak": f"{peak / 1e9:,.0f} GFLOP/s" if math.isfinite(peak) else None,
        "has_mfu": bool(shares),
    }
    return Section("speed", "Speed", "speed.html", context)


def _overlap_caption(run: Run) -> str:
    """Say what early reads of the item table saw, where there were any."""
    rates = [rate for rate in _column(run.train, "collision_rate") if math.isfinite(rate)]
    if not rates:
        return ""
    stale = max((value for value in _column(run.train, "staleness") if math.isfinite(value)), default=0.0)
    mean = sum(rates) / len(rates)
    return f"{percent(mean)} of a batch's rows were in the batch before too; look-ups lacked up to {stale:g} updates."


def profile_figure(milliseconds: Mapping[str, float]) -> Figure:
    """Shares of a step's time by operator, and in the caption how long the step took."""
    total = sum(milliseconds.values())
    shares = {name.replace("_", " "): value / total for name, value in milliseconds.items()}
    axis = Axis("share of a step", format=percent, zero=True)
    return Figure.draw(
        lambda width: bar_chart(shares, title="Where the time of a step goes", axis=axis, width=width, row_height=24),
        f"Mean of a few early steps of {total:,.0f} ms. The matrix products of an operator count as its own.",
    )


def _figure(
    series: list[Series], title: str, x: Axis, y: Axis, marks: list[Mark] | None = None, caption: str = ""
) -> Figure:
    return Figure.draw(
        lambda width: line_chart(series, title=title, x=x, y=y, marks=marks or [], width=width, height=280), caption
    )


def _column(records: list[Record], key: str) -> list[float]:
    return [wording.number(record.get(key)) for record in records]
