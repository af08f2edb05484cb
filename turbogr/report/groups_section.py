"""The section about whom the model serves: popular and rare items, short and long histories, and coverage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turbogr.evaluation.metric_info import MetricInfo, one_per_family
from turbogr.evaluation.metrics import has_user_values
from turbogr.evaluation.user_positions import UserPositions
from turbogr.plot import Axis, grouped_bar_chart
from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.scores import INTERVAL, Scores, coverage_of, plus_minus, scores_of, signed, system_title, verdict
from turbogr.report.section import Figure, Section
from turbogr.report.user_groups import UserGroup, group_difference, group_score, thirds

Names = Callable[[UserGroup, int, int], str]


def groups(run: RunData) -> Section | None:
    """Metrics by kinds of users, and coverage; None for a run without either."""
    all_scores = scores_of(run)
    if not all_scores:
        return None
    scores = all_scores[0]
    metric = _splittable(scores)
    splits = [] if metric is None or scores.by_user is None else _splits(run, scores, scores.by_user, metric)
    coverage = coverage_sentence(run)
    if not splits and not coverage:
        return None
    context = {"splits": splits, "coverage": coverage, "explained": INTERVAL if splits else ""}
    return Section("groups", "Who it works for", "groups.html", context)


def _splittable(scores: Scores) -> MetricInfo | None:
    """Return the first headline metric that has a value per user."""
    return next((metric for metric in one_per_family(scores.metrics) if has_user_values(metric.name)), None)


def split_groups(by_user: UserPositions) -> dict[str, list[tuple[str, UserGroup]]]:
    """Return the groups with their names, by the title of the split."""
    return {
        "By popularity of the next item": _named(thirds(by_user.target_counts), item_group),
        "By length of the history": _named(thirds(by_user.history_lengths), history_group),
    }


def _named(groups: list[UserGroup], name: Names) -> list[tuple[str, UserGroup]]:
    return [(name(group, place, len(groups)), group) for place, group in enumerate(groups)]


def item_group(group: UserGroup, place: int, num_groups: int) -> str:
    """Name a group by the popularity of the held-out items: rare: up to 42 training events."""
    return _name(group, place, num_groups, ("rare", "popular"), "training events")


def history_group(group: UserGroup, place: int, num_groups: int) -> str:
    """Name a group by the lengths of the histories: short: up to 18 events."""
    return _name(group, place, num_groups, ("short", "long"), "events")


def _name(group: UserGroup, place: int, num_groups: int, words: tuple[str, str], unit: str) -> str:
    if num_groups == 1:
        return f"all: {wording.count(group.low)} to {wording.count(group.high)} {unit}"
    if place == 0:
        return f"{words[0]}: up to {wording.count(group.high)} {unit}"
    if place == num_groups - 1:
        return f"{words[1]}: {wording.count(group.low)} or more"
    return f"medium: {wording.count(group.low)} to {wording.count(group.high)}"


def _splits(run: RunData, scores: Scores, by_user: UserPositions, metric: MetricInfo) -> list[dict[str, Any]]:
    rivals = [name for name in scores.rivals(metric) if name in by_user.positions]
    rival = rivals[0] if rivals else None
    return [
        {
            "title": title,
            "heads": _heads(run, by_user, metric, rival),
            "rows": [_row(by_user, name, group, metric, rival) for name, group in named],
            "figure": _figure(run, by_user, named, metric, rival, title),
        }
        for title, named in split_groups(by_user).items()
    ]


def _heads(run: RunData, by_user: UserPositions, metric: MetricInfo, rival: str | None) -> list[str]:
    heads = ["users", f"{system_title(run, by_user.main)}, {metric.title}"]
    return heads if rival is None else [*heads, system_title(run, rival), "difference"]


def _row(by_user: UserPositions, name: str, group: UserGroup, metric: MetricInfo, rival: str | None) -> dict[str, Any]:
    score = group_score(by_user, group, by_user.main, metric.name)
    cells = [
        {"text": wording.count(group.num_users), "margin": "", "class": "plain"},
        {"text": f"{score.value:.4f}", "margin": plus_minus(score.margin), "class": ""},
    ]
    if rival is not None:
        other = group_score(by_user, group, rival, metric.name)
        difference = group_difference(by_user, group, rival, metric.name)
        outcome = verdict(difference.value, difference.margin, higher_is_better=metric.higher_is_better)
        cells.append({"text": f"{other.value:.4f}", "margin": plus_minus(other.margin), "class": ""})
        cells.append({"text": signed(difference.value), "margin": plus_minus(difference.margin), "class": outcome})
    return {"title": name, "cells": cells}


def _figure(
    run: RunData,
    by_user: UserPositions,
    named: list[tuple[str, UserGroup]],
    metric: MetricInfo,
    rival: str | None,
    title: str,
) -> Figure:
    systems = [by_user.main] if rival is None else [by_user.main, rival]
    values = {
        system_title(run, system): [group_score(by_user, group, system, metric.name).value for _, group in named]
        for system in systems
    }
    y = Axis(metric.unit, format=wording.metric_axis_format(metric), zero=True)
    short = [name.partition(":")[0] for name, _ in named]
    heading = f"{metric.title} {title[0].lower()}{title[1:]}"
    return Figure.draw(lambda width: grouped_bar_chart(short, values, title=heading, y=y, width=width, height=220))


def coverage_sentence(run: RunData) -> str:
    """Return how much of the catalogue the model shows to anybody; empty where it was not measured."""
    found = coverage_of(run)
    if found is None:
        return ""
    return (
        f"Coverage: {wording.share(found.share)} of the catalogue ({wording.count(found.num_shown)} of "
        f"{wording.count(found.num_items)} items) is in the top {found.k} of at least one of "
        f"{wording.count(found.num_users)} evaluated users."
    )
