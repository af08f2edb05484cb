"""The section about predicted actions: of every task its metrics, the ROC, and how well probabilities fit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from turbogr.evaluation.metric_info import MetricInfo
from turbogr.plot import Axis, Series
from turbogr.report import wording
from turbogr.report.result_section import metric_table
from turbogr.report.run_data import RunData
from turbogr.report.scores import INTERVAL, Scores, part_name, scores_of, system_title
from turbogr.report.section import Figure, Section, line_figure
from turbogr.runs import Record

_MOST_CURVES = 4
_OTHER_SLOT = 5


def actions(run: RunData) -> Section | None:
    """Tables and figures of every task on the first part; None for a run that predicts no actions."""
    all_scores = scores_of(run)
    if not all_scores:
        return None
    scores = all_scores[0]
    details = _details(run, scores.part)
    tasks = [_task(run, scores, details, name) for name in details.get(scores.main, {})]
    if not tasks:
        return None
    context = {"tasks": tasks, "part": part_name(scores.part, run), "explained": INTERVAL}
    return Section("actions", "Predicted actions", "actions.html", context)


def _details(run: RunData, part: str) -> dict[str, dict[str, Record]]:
    """Return what the evaluation says of each system's predictions, by system and task; damaged parts are left out."""
    by_part = (run.evaluation or {}).get("details")
    systems = by_part.get(part) if isinstance(by_part, dict) else None
    found: dict[str, dict[str, Record]] = {}
    for system, tasks in (systems if isinstance(systems, dict) else {}).items():
        if isinstance(tasks, dict):
            found[str(system)] = {str(name): about for name, about in tasks.items() if isinstance(about, dict)}
    return found


def _task(run: RunData, scores: Scores, details: dict[str, dict[str, Record]], name: str) -> dict[str, Any]:
    about = details[scores.main][name]
    metrics = [dataclasses.replace(m, title=m.unit or m.title) for m in scores.metrics if m.name.endswith(f"/{name}")]
    shown = [system for system in _ordered(scores, metrics) if name in details.get(system, {})]
    figures = [_roc(run, details, shown, name), _calibration(run, details, shown[:1], name)]
    undefined = about.get("undefined")
    reasons = undefined.items() if isinstance(undefined, dict) else ()
    return {
        "name": name,
        "summary": _summary(about),
        "table": metric_table(run, scores, metrics) if metrics else None,
        "figures": [figure for figure in figures if figure is not None],
        "undefined": [f"{measured} is not defined: {reason}." for measured, reason in reasons],
    }


def _ordered(scores: Scores, metrics: list[MetricInfo]) -> list[str]:
    """Return the systems, the run's own first, then the baselines that are best by the task's first metric."""
    return [*scores.own, *(scores.ordered_baselines(metrics[0]) if metrics else [])]


def _summary(about: Record) -> str:
    """Return how many events there are, of which kind, and which are not measured."""
    events, positive = wording.number(about.get("num_events")), wording.number(about.get("num_positive"))
    parts = [f"{wording.count(events)} events"]
    if positive >= 0 and events > 0:
        parts[0] += f", {wording.share(positive / events)} of them positive"
    mean = wording.number(about.get("mean"))
    if math.isfinite(mean):
        parts[0] += f", of mean {mean:.4g}"
    users, one_class = wording.number(about.get("gauc_users")), wording.number(about.get("one_class_users"))
    if users >= 0 and one_class >= 0:
        parts.append(
            f"GAUC is of the {wording.count(users)} users who have events of both classes, {wording.count(one_class)} "
            "others do not count"
        )
    unknown = wording.number(about.get("num_unknown"))
    if unknown > 0:
        parts.append(f"of {wording.count(unknown)} more it is not known what happened")
    return "; ".join(parts) + "."


def _roc(run: RunData, details: dict[str, dict[str, Record]], systems: list[str], name: str) -> Figure | None:
    curves: list[Series] = []
    for slot, system in enumerate(systems):
        points = _pairs(details[system][name].get("roc"), 2)
        if points and len(curves) < _MOST_CURVES:
            curves.append(Series(system_title(run, system), [p[0] for p in points], [p[1] for p in points], slot=slot))
    if not curves:
        return None
    chance = Series("chance", [0.0, 1.0], [0.0, 1.0], slot=_OTHER_SLOT)
    x, y = Axis("false positive rate", zero=True), Axis("true positive rate", zero=True)
    return line_figure([*curves, chance], f"ROC of {name}", x, y)


def _calibration(run: RunData, details: dict[str, dict[str, Record]], systems: list[str], name: str) -> Figure | None:
    for system in systems:
        bins = _pairs(details[system][name].get("calibration"), 4)
        if bins:
            predicted, observed = [b[1] for b in bins], [b[2] for b in bins]
            margins = [1.96 * b[3] if math.isfinite(b[3]) else 0.0 for b in bins]
            low = [value - margin for value, margin in zip(observed, margins, strict=True)]
            high = [value + margin for value, margin in zip(observed, margins, strict=True)]
            own = Series(system_title(run, system), predicted, observed, low, high, slot=0)
            ends = [min(predicted), max(predicted)]
            exact = Series("as predicted", ends, ends, slot=_OTHER_SLOT)
            return line_figure(
                [own, exact],
                f"Calibration of {name}",
                Axis("predicted"),
                Axis("observed"),
                caption="Events in tenths by prediction; the band is a 95 % confidence interval of what was observed.",
            )
    return None


def _pairs(rows: Any, width: int) -> list[list[float]]:
    """Return rows of `width` numbers; a table that is anything else is none."""
    if not isinstance(rows, list):
        return []
    found = [[wording.number(value) for value in row] for row in rows if isinstance(row, list) and len(row) == width]
    return [row for row in found if all(math.isfinite(value) for value in row[:3])]
