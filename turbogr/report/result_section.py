"""The sections about how good the model is: the headline, and all metrics beside the baselines."""

from __future__ import annotations

import math
from typing import Any

from turbogr.evaluation.baseline_titles import PHRASES, refusal_lines
from turbogr.evaluation.metric_info import MetricInfo, most_informative, one_per_family
from turbogr.evaluation.user_positions import DELIVERED, MODEL
from turbogr.plot import Axis, bar_chart, grouped_bar_chart
from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.scores import (
    INTERVAL,
    Scores,
    coverage_of,
    delivered_title,
    direction,
    model_title,
    part_name,
    plus_minus,
    same_scale,
    scores_of,
    signed,
    system_title,
    verdict,
)
from turbogr.report.section import Figure, Section
from turbogr.runs import Record, metrics_of

_MOST_BARS = 5  # groups of bars that fit on a narrow screen
_MOST_SYSTEMS = 4  # systems whose bars can stand side by side in a group
_MOST_COLUMNS = 3  # metrics that fit beside the names on a narrow screen
_MOST_COMPARISONS = 3  # baselines that the headline names


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
    value = scores.main_values[metric.name]
    names = scores.rivals(metric)
    comparisons = [
        {
            "name": PHRASES.get(name, name),
            "value": wording.metric_value(metric, scores.systems[name][metric.name]),
            "factor": _factor(value, scores.systems[name][metric.name]),
            "better": metric.is_better(value, scores.systems[name][metric.name]),
        }
        for name in names
    ]
    before, _, after = metric.say("\0").partition("\0")
    return {
        "model": delivered_title(run) if scores.main == DELIVERED else model_title(run),
        "subject": "What is delivered" if scores.main == DELIVERED else "The model",
        "delivered": _delivered(run, scores, metric),
        "metric": metric.title,
        "before": before,
        "value": wording.metric_value(metric, value),
        "after": after,
        "interval": _interval(metric, value, scores.margin(scores.main, metric.name)),
        "part": part_name(scores.part, run),
        "num_users": None if scores.num_users is None else wording.count(scores.num_users),
        "comparisons": comparisons[:_MOST_COMPARISONS],
        "others": len(comparisons[_MOST_COMPARISONS:]),
        "not_beaten": [entry["name"] for entry in comparisons if not entry["better"]],
        "unsure": _unsure(scores, metric, names),
        "protocol": _protocol(run),
        "figure": _bars(run, scores, metric, f"{metric.title} on the {part_name(scores.part, run)}"),
    }


def _delivered(run: RunData, scores: Scores, metric: MetricInfo) -> str:
    """Return a sentence about what is delivered in the model's place, with the model's own value; else nothing."""
    if scores.main == MODEL:
        return ""
    own = wording.metric_value(metric, scores.systems[MODEL][metric.name])
    return (
        f"Delivered, and used by turbogr recommend, is {delivered_title(run)}: it was best on the validation items. "
        f"{model_title(run)} alone has {metric.title} {own}."
    )


def _possessive(run: RunData, scores: Scores) -> str:
    return "the delivered" if scores.main == DELIVERED else f"{model_title(run)}'s"


def _interval(metric: MetricInfo, value: float, amount: float) -> str:
    """Return the ends of the confidence interval; a share lies between 0 and 1. Empty where it is unknown."""
    if not math.isfinite(amount):
        return ""
    low, high = value - amount, value + amount
    if metric.format == "share":
        low, high = max(low, 0.0), min(high, 1.0)
    return f"{wording.metric_value(metric, low)} to {wording.metric_value(metric, high)}"


def _unsure(scores: Scores, metric: MetricInfo, names: list[str]) -> list[str]:
    """Return the baselines that the run beats by no more than the noise."""
    value = scores.main_values[metric.name]
    beaten = [name for name in names if metric.is_better(value, scores.systems[name][metric.name])]
    differences = {name: scores.difference(metric.name, name) for name in beaten}
    return [
        f"{PHRASES.get(name, name)} ({signed(found)} {plus_minus(amount)})"
        for name, (found, amount) in differences.items()
        if math.isfinite(amount) and verdict(found, amount) == "noise"
    ]


def _bars(run: RunData, scores: Scores, metric: MetricInfo, title: str) -> Figure:
    """Draw one metric of all systems with their intervals, the run's own first, then the best baseline."""
    shown = [*scores.own, *scores.ordered_baselines(metric)]
    bars = {system_title(run, name): scores.systems[name][metric.name] for name in shown}
    errors = [scores.margin(name, metric.name) for name in shown]
    axis = Axis(metric.unit, format=lambda value: wording.metric_value(metric, value), zero=True)
    slots = list(range(len(scores.own))) + [5] * (len(shown) - len(scores.own))
    return Figure.draw(
        lambda width: bar_chart(bars, title=title, axis=axis, slots=slots, errors=errors, width=width),
        direction(metric),
    )


def _factor(value: float, other: float) -> str:
    """Return how many times `other` the value is; empty where a factor says nothing."""
    if value > 0 and other > 0:
        return wording.times(value / other)
    return "∞" if value > 0 and other == 0 else ""


def _latest(run: RunData) -> Record | None:
    """Return the newest evaluation during training, for a run that was not evaluated at its end."""
    for record in reversed(run.evaluations):
        values = metrics_of(record)
        if values:
            metric = one_per_family(run.folder.describe_metrics(values))[0]
            return {
                "metric": metric.title,
                "value": wording.metric_value(metric, values[metric.name]),
                "part": part_name(str(record.get("part", "")), run),
                "step": wording.count(record["step"]),
            }
    return None


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


def _key_facts(run: RunData) -> list[tuple[str, str, str]]:
    """Return (name, value, detail) of what is known of the data, the parameters, the training time and coverage."""
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
    covered = coverage_of(run)
    if covered is not None:
        detail = f"of the items are in somebody's top {covered.k}"
        facts.append(("Coverage", wording.share(covered.share), detail))
    return [fact for fact in facts if wording.MISSING not in f"{fact[1]}{fact[2]}"]


def metrics(run: RunData) -> Section:
    """Every metric beside the baselines, with the protocol under which it was measured."""
    tables = [_part(run, scores) for scores in scores_of(run)]
    context = {"tables": tables, "protocol": _protocol(run), "refused": refusal_lines(run.refused)}
    return Section("metrics", "Metrics", "metrics.html", context)


def _part(run: RunData, scores: Scores) -> dict[str, Any]:
    first = one_per_family(scores.metrics)[:_MOST_COLUMNS]
    has_margins = any(scores.errors.values())
    has_differences = any(math.isfinite(scores.difference(first[0].name, name)[1]) for name in scores.baselines)
    explained = [INTERVAL] if has_margins else []
    if has_differences:
        explained.append(
            f"The difference is {_possessive(run, scores)} {first[0].title} minus that of the method, user by user; "
            "where its interval has 0 in it, it may be chance."
        )
    return {
        "part": part_name(scores.part, run),
        "num_users": None if scores.num_users is None else wording.count(scores.num_users),
        "table": metric_table(run, scores, first, differences=has_differences),
        "all": metric_table(run, scores, scores.metrics) if len(scores.metrics) > len(first) else None,
        "explained": " ".join(explained),
        "figures": _figures(run, scores),
    }


def metric_table(
    run: RunData, scores: Scores, metrics: list[MetricInfo], *, differences: bool = False
) -> dict[str, Any]:
    """Return a table with a row per system and a column per metric, and maybe differences by the first metric."""
    names = [*scores.own, *scores.ordered_baselines(metrics[0])]
    names += [name for name in scores.systems if name not in names]
    rows = []
    for name in names:
        cells = [_cell(scores, name, names, metric) for metric in metrics]
        if differences:
            cells.append(_difference(scores, name, metrics[0]))
        rows.append({"title": system_title(run, name), "cells": cells})
    heads = [{"title": metric.title, "lower_is_better": not metric.higher_is_better} for metric in metrics]
    if differences:
        heads.append({"title": f"difference in {metrics[0].title}", "lower_is_better": False})
    return {"heads": heads, "rows": rows}


def _cell(scores: Scores, name: str, names: list[str], metric: MetricInfo) -> dict[str, str]:
    values = [scores.systems[other].get(metric.name, math.nan) for other in names]
    best, value = metric.best(values), scores.systems[name].get(metric.name, math.nan)
    return {
        "text": f"{value:.4f}" if math.isfinite(value) else "not measured",
        "margin": plus_minus(scores.margin(name, metric.name)),
        "class": "best" if best is not None and value == values[best] else "",
    }


def _difference(scores: Scores, name: str, metric: MetricInfo) -> dict[str, str]:
    if name == scores.main:
        return {"text": "reference", "margin": "", "class": "plain"}
    value, amount = scores.difference(metric.name, name)
    if not math.isfinite(amount):
        return {"text": "not measured", "margin": "", "class": "plain"}
    outcome = verdict(value, amount, higher_is_better=metric.higher_is_better)
    return {"text": signed(value), "margin": plus_minus(amount), "class": outcome}


def _figures(run: RunData, scores: Scores) -> list[Figure]:
    """Draw all metrics side by side, or where there are too many systems for that, the main ones one by one."""
    if len(scores.systems) <= _MOST_SYSTEMS:
        return [_comparison(run, scores, group) for group in same_scale(scores.metrics)]
    # The headline has the first metric.
    return [_bars(run, scores, metric, metric.title) for metric in one_per_family(scores.metrics)[1:2]]


def _comparison(run: RunData, scores: Scores, metrics: list[MetricInfo]) -> Figure:
    systems = {system_title(run, name): values for name, values in scores.systems.items()}

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
