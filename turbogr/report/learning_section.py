"""The section about learning: loss, metrics over epochs, gradient norm and learning rate."""

from __future__ import annotations

import math

from turbogr.evaluation.metric_info import MetricInfo, most_informative, one_per_family
from turbogr.plot import Axis, Mark, Series, thinned
from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.scores import direction, same_scale
from turbogr.report.section import Figure, Section, line_figure
from turbogr.runs import Record, metrics_of

_CURVES = {
    "grad_norm": "Gradient norm",
    "grad_norm_of_parts": "Gradient norm before ranks are summed",
    "lr": "Learning rate",
}
_PARTS = {"valid": "Validation metrics", "test": "Test metrics"}
_MOST_CURVES = 5
_MOST_BAD_STEPS = 10


def learning(run: RunData) -> Section:
    """Loss, metrics over epochs with the best epoch marked, gradient norm and learning rate."""
    figures = [_loss(run)] if run.training else []
    for part in sorted({str(record.get("part", "")) for record in run.evaluations}):
        figures.extend(_metric_curves(run, part))
    steps = wording.column(run.training, "step")
    for key, title in _CURVES.items():
        values = wording.column(run.training, key)
        if len({value for value in values if math.isfinite(value)}) > 1:
            curve = thinned(title, steps, values)
            figures.append(line_figure([curve], title, Axis("step"), Axis(zero=key == "lr")))
    context = {"figures": figures, "missing": _missing(run), "notes": _left_out(run)}
    return Section("learning", "Learning", "figures.html", context)


def _left_out(run: RunData) -> list[str]:
    """Say which steps were left out, and why."""
    shown = [f"{wording.count(bad['step'])} ({bad.get('what')})" for bad in run.bad_steps[:_MOST_BAD_STEPS]]
    if not shown:
        return []
    more = len(run.bad_steps) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more else "")
    return [f"Left out because a value was not finite: {'steps' if len(run.bad_steps) > 1 else 'step'} {listed}."]


def _missing(run: RunData) -> str:
    if not run.training and not run.evaluations:
        return "This run has recorded neither training steps nor evaluations yet."
    if not run.training:
        return "This run has recorded no training steps."
    return "" if run.evaluations else "The model has not been evaluated during this run yet."


def _loss(run: RunData) -> Figure:
    losses = wording.column(run.training, "loss")
    curve = thinned("loss", wording.column(run.training, "step"), losses)
    skipped = sum(1 for value in losses if not math.isfinite(value))
    caption = f"{skipped} recorded losses were not finite and are left out." if skipped else ""
    if curve.low is not None:
        caption = f"Mean of neighbouring records; the band is from the lowest to the highest of them. {caption}".strip()
    name = "" if run.config.get("task") == "ranking" else str(run.setting("loss", "name") or "").replace("-", " ")
    return line_figure([curve], "Training loss", Axis("step"), Axis(name), caption=caption)


def _metric_curves(run: RunData, part: str) -> list[Figure]:
    """Draw the metrics of a part over epochs, in one figure per scale."""
    records = [record for record in run.evaluations if str(record.get("part", "")) == part]
    metrics = run.folder.describe_metrics({name for record in records for name in metrics_of(record)})
    if not metrics:
        return []
    selecting = str(run.setting("evaluate", "metric") or one_per_family(metrics)[0].name)
    groups = same_scale(metrics)
    title = _PARTS.get(part, f"Metrics, {part}")
    return [
        _curves(group, records, selecting, title if len(groups) == 1 else f"{title}: {_titles(group)}")
        for group in groups
    ]


def _curves(metrics: list[MetricInfo], records: list[Record], selecting: str, title: str) -> Figure:
    drawn = most_informative(metrics, _MOST_CURVES, selecting)
    epochs = wording.column(records, "epoch")
    by_epoch = all(math.isfinite(epoch) for epoch in epochs)
    xs = epochs if by_epoch else wording.column(records, "step")
    series = [Series(metric.title, xs, wording.column(records, metric.name)) for metric in drawn]
    captions = [direction(metrics[0])]
    marks = []
    for slot, metric in enumerate(drawn):
        best = metric.best(series[slot].y) if metric.name == selecting else None
        if best is not None:
            at, value = f"{'epoch' if by_epoch else 'step'} {xs[best]:g}", series[slot].y[best]
            marks.append(Mark(xs[best], value, f"best {metric.title}, {at}", slot))
            captions.append(f"{metric.extreme} {metric.title}: {value:.4f} at {at}.")
    left_out = [metric for metric in metrics if metric not in drawn]
    if left_out:
        captions.append(f"Not drawn: {_titles(left_out)}.")
    x = Axis("epoch", integer=True) if by_epoch else Axis("step")
    y = Axis(format=wording.metric_axis_format(metrics[0]), zero=True)
    return line_figure(series, title, x, y, marks, " ".join(filter(None, captions)))


def _titles(metrics: list[MetricInfo]) -> str:
    return ", ".join(metric.title for metric in metrics)
