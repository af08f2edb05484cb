"""The sections about how good the model is: the headline, and all metrics beside the baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from turbogr import plugins
from turbogr.evaluation.baselines import PHRASES, TITLES
from turbogr.evaluation.metric_info import MetricInfo, most_informative, one_per_family
from turbogr.plot import Axis, bar_chart, grouped_bar_chart
from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.section import Figure, Section
from turbogr.runs import Record, metrics_of

_MOST_BARS = 5  # groups of bars that fit on a narrow screen


def model_title(run: RunData) -> str:
    """Return the model's name as the literature writes it; runs of version 0.1 have recorded its key only."""
    name = str(run.part("model").get("name") or run.setting("model", "name") or "model")
    if title := run.part("model").get("title"):
        return str(title)
    return plugins.find("block", name).title if name in plugins.built_in_names("block") else name


@dataclass(frozen=True)
class Scores:
    """The metrics of one held-out part by name: the model's, and those of each baseline.

    `metrics` describes the model's, in the order in which they are shown.
    """

    part: str
    metrics: list[MetricInfo]
    model: dict[str, float]
    baselines: dict[str, dict[str, float]]


def scores_of(run: RunData) -> list[Scores]:
    """Return the scores of every part that the model was measured on, the test part first."""
    parts = (run.evaluation or {}).get("parts")
    if not isinstance(parts, dict):
        return []
    found = []
    for part in sorted(parts, key=lambda name: (name != "test", name)):
        systems = parts[part] if isinstance(parts[part], dict) else {}
        measured = {name: metrics_of(values) for name, values in systems.items() if isinstance(values, dict)}
        model = measured.pop("model", {})
        if model:
            baselines = {name: values for name, values in measured.items() if values}
            found.append(Scores(part, run.folder.describe_metrics(model), model, baselines))
    return found


def headline(run: RunData) -> Section:
    """What a reader wants to know first: how good is the model, and how much better than the baselines?"""
    context: dict[str, Any] = {"model": model_title(run), "figure": None, "facts": _key_facts(run)}
    all_scores = scores_of(run)
    if all_scores:
        context.update(_result(run, all_scores[0]))
    else:
        context["latest"] = _latest(run)
    return Section("result", "Result", "headline.html", context)


def _result(run: RunData, scores: Scores) -> dict[str, Any]:
    metric = one_per_family(scores.metrics)[0]
    value = scores.model[metric.name]
    others = {name: values[metric.name] for name, values in scores.baselines.items() if metric.name in values}
    comparisons = [
        {
            "name": PHRASES.get(name, name),
            "value": wording.metric_value(metric, other),
            "factor": _factor(value, other),
            "better": metric.is_better(value, other),
        }
        for name, other in others.items()
    ]
    bars = {model_title(run): value, **{TITLES.get(name, name): other for name, other in others.items()}}
    axis = Axis(metric.unit, format=lambda value: wording.metric_value(metric, value), zero=True)
    slots = [0] + [5] * len(others)
    title = f"{metric.title} on the {part_name(scores.part)}"
    before, _, after = metric.say("\0").partition("\0")
    return {
        "metric": metric.title,
        "before": before,
        "value": wording.metric_value(metric, value),
        "after": after,
        "part": part_name(scores.part),
        "num_users": _num_users(run, scores.part),
        "comparisons": comparisons,
        "not_beaten": [entry["name"] for entry in comparisons if not entry["better"]],
        "protocol": _protocol(run),
        "figure": Figure.draw(
            lambda width: bar_chart(bars, title=title, axis=axis, slots=slots, width=width), direction(metric)
        ),
    }


def _factor(value: float, other: float) -> str:
    """Return how many times `other` the value is; empty where a factor says nothing."""
    if value > 0 and other > 0:
        return wording.times(value / other)
    return "∞" if value > 0 and other == 0 else ""


def direction(metric: MetricInfo) -> str:
    """Return the caption of a figure whose metric should be low, else nothing."""
    return "" if metric.higher_is_better else "Lower is better."


def _latest(run: RunData) -> Record | None:
    """Return the newest evaluation during training, for a run that was not evaluated at its end."""
    for record in reversed(run.evaluations):
        values = metrics_of(record)
        if values:
            metric = one_per_family(run.folder.describe_metrics(values))[0]
            return {
                "metric": metric.title,
                "value": wording.metric_value(metric, values[metric.name]),
                "part": part_name(str(record.get("part", ""))),
                "step": wording.count(record["step"]),
            }
    return None


def part_name(part: str) -> str:
    """Return what a held-out part is called in a sentence."""
    return {"test": "test items", "valid": "validation items"}.get(part, part)


def _protocol(run: RunData) -> str:
    """Return what was measured, on which checkpoint, and how many users were not measured."""
    evaluation = run.evaluation or {}
    words = wording.sentence(evaluation.get("protocol"))
    if not words:
        return "The evaluation does not state its protocol, so do not compare these numbers with others."
    skipped = evaluation.get("skipped")
    reasons = skipped.items() if isinstance(skipped, dict) else []
    left_out = "; ".join(f"{wording.count(users)} ({reason})" for reason, users in reasons if wording.number(users) > 0)
    return f"{words} Users not measured: {left_out}." if left_out else words


def _num_users(run: RunData, part: str) -> str | None:
    users = (run.evaluation or {}).get("num_users")
    if isinstance(users, dict):
        users = users.get(part)
    return wording.count(users) if math.isfinite(wording.number(users)) else None


def _key_facts(run: RunData) -> list[tuple[str, str, str]]:
    """Return (name, value, detail) of a few facts: data, parameters, training time and speed."""
    data, model = run.part("data"), run.part("model")
    facts = [
        (
            "Data",
            f"{wording.count(data.get('num_events'))} events",
            f"{wording.count(data.get('num_users'))} users, {wording.count(data.get('num_items'))} items",
        ),
        (
            "Parameters",
            wording.count(model.get("num_dense_parameters")),
            f"and {wording.count(model.get('num_table_parameters'))} in embedding tables",
        ),
    ]
    if run.training:
        last = run.training[-1]
        epoch = wording.number(last.get("epoch"))
        detail = f"{wording.count(last['step'])} steps" + (f", {epoch:.4g} epochs" if math.isfinite(epoch) else "")
        facts.append(("Training", wording.duration(last.get("elapsed")), detail))
        speeds = sorted(filter(math.isfinite, (wording.number(r.get("tokens_per_second")) for r in run.training)))
        shares = sorted(filter(math.isfinite, (wording.number(r.get("mfu_strict")) for r in run.training)))
        if speeds:
            detail = f"strict MFU {wording.share(shares[len(shares) // 2])}" if shares else "median"
            facts.append(("Speed", f"{wording.count(speeds[len(speeds) // 2])} tokens/s", detail))
    return facts


def metrics(run: RunData) -> Section:
    """Every metric beside the baselines, with the protocol under which it was measured."""
    tables = [_table(run, scores) for scores in scores_of(run)]
    return Section("metrics", "Metrics", "metrics.html", {"tables": tables, "protocol": _protocol(run)})


def _table(run: RunData, scores: Scores) -> dict[str, Any]:
    titles = {name: TITLES.get(name, name) for name in scores.baselines}
    systems = {model_title(run): scores.model, **{titles[name]: values for name, values in scores.baselines.items()}}
    reference = next(iter(scores.baselines), None)
    return {
        "part": part_name(scores.part),
        "num_users": _num_users(run, scores.part),
        "systems": list(systems),
        "rows": [_row(metric, list(systems.values()), reference is not None) for metric in scores.metrics],
        "reference": None if reference is None else titles[reference],
        "figures": [_comparison(group, systems) for group in same_scale(scores.metrics)],
    }


def _row(metric: MetricInfo, systems: list[dict[str, float]], has_reference: bool) -> dict[str, Any]:
    values = [system.get(metric.name, math.nan) for system in systems]
    best = metric.best(values)
    return {
        "metric": metric.title,
        "lower_is_better": not metric.higher_is_better,
        "cells": [
            {
                "text": f"{value:.4f}" if math.isfinite(value) else wording.MISSING,
                "best": best is not None and value == values[best],
            }
            for value in values
        ],
        "factor": (_factor(values[0], values[1]) or wording.MISSING) if has_reference else None,
    }


def same_scale(metrics: list[MetricInfo]) -> list[list[MetricInfo]]:
    """Group metrics that can share an axis: those of the same format and direction, in the order of the first ones."""
    groups: dict[tuple[str, bool], list[MetricInfo]] = {}
    for metric in metrics:
        groups.setdefault((metric.format, metric.higher_is_better), []).append(metric)
    return list(groups.values())


def _comparison(metrics: list[MetricInfo], systems: dict[str, dict[str, float]]) -> Figure:
    def draw(width: float) -> str:
        shown = metrics if width > 400 else most_informative(metrics, _MOST_BARS)
        return grouped_bar_chart(
            [metric.title for metric in shown],
            {name: [system.get(metric.name, math.nan) for metric in shown] for name, system in systems.items()},
            title="Beside the baselines",
            y=Axis(format=wording.metric_axis_format(metrics[0]), zero=True),
            width=width,
        )

    return Figure.draw(draw, direction(metrics[0]))
