"""Several runs on one page: their metrics side by side, user by user where they can be, curves, and what differs.

The sections are functions from `Comparison` to a `Section`, as those of a single run are from `RunData`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbogr.errors import UserError
from turbogr.evaluation.baseline_titles import PHRASES
from turbogr.evaluation.metric_info import MetricInfo, one_per_family
from turbogr.evaluation.metrics import has_user_values
from turbogr.plot import Axis, Series, bar_chart, thinned
from turbogr.report import wording
from turbogr.report.groups_section import split_groups
from turbogr.report.run_data import RunData
from turbogr.report.scores import (
    INTERVAL,
    Scores,
    difference_of,
    direction,
    model_title,
    part_name,
    plus_minus,
    scores_of,
    signed,
    system_title,
    verdict,
)
from turbogr.report.section import Figure, Section, line_figure
from turbogr.report.settings_section import written_setting
from turbogr.report.user_groups import group_score
from turbogr.runs import metrics_of

_MOST_COLUMNS = 3
_NOT_MEASURED = {"text": "not measured", "margin": "", "class": "plain"}


@dataclass(frozen=True)
class Comparison:
    """Runs by the name that the page gives them; the first is what the others are compared with."""

    runs: dict[str, RunData]

    @classmethod
    def read(cls, paths: Sequence[Path | str]) -> Comparison:
        """Read some run folders.

        Raises:
            UserError: one of them is not a run folder, or is named twice.
        """
        folders = [Path(path).resolve() for path in paths]
        twice = next((folder for folder, count in Counter(folders).items() if count > 1), None)
        if twice is not None:
            raise UserError(f"{twice} is named twice; compare different runs")
        names = Counter(folder.name for folder in folders)
        titles = [folder.name if names[folder.name] == 1 else "/".join(folder.parts[-2:]) for folder in folders]
        titles = titles if len(set(titles)) == len(titles) else [str(folder) for folder in folders]
        return cls({title: RunData.read(path) for title, path in zip(titles, paths, strict=True)})

    @property
    def first(self) -> str:
        return next(iter(self.runs))

    @functools.cached_property
    def scores(self) -> dict[str, Scores]:
        """The scores of the runs that were measured at their end, on the test part where they have one."""
        found = {name: scores_of(run) for name, run in self.runs.items()}
        return {name: scores[0] for name, scores in found.items() if scores}

    @functools.cached_property
    def metrics(self) -> list[MetricInfo]:
        """All metrics of the runs, in the order in which they are shown."""
        described: dict[str, MetricInfo] = {}
        for scores in self.scores.values():
            described |= {metric.name: metric for metric in scores.metrics if metric.name not in described}
        return list(described.values())

    @property
    def main_metrics(self) -> list[MetricInfo]:
        return one_per_family(self.metrics)[:_MOST_COLUMNS]

    @functools.cached_property
    def baselines(self) -> dict[str, str]:
        """Baselines of the runs that can be compared, each with a run that has it."""
        return {name: run for run in reversed(self.comparable) for name in self.scores[run].baselines}

    def is_same_data(self, name: str) -> bool:
        """Whether a run was trained on the data of the first."""
        hashes = [self.runs[run].part("data").get("content_hash") for run in (self.first, name)]
        return hashes[0] is not None and hashes[0] == hashes[1]

    @functools.cached_property
    def comparable(self) -> list[str]:
        """The runs that were measured as the first measured one was: on the same data and part, by the same rule."""
        names = [name for name in self.scores if self.is_same_data(name)] or list(self.scores)[:1]
        return [name for name in names if self._measured_as(name) == self._measured_as(names[0])]

    def _measured_as(self, name: str) -> tuple[str, str]:
        return self.scores[name].part, _rule(self.runs[name])

    def difference(self, name: str, metric: str, system: str | None = None) -> tuple[float, float]:
        """Return a metric of what a run delivers, or of another of its systems, minus that of the first run.

        It is taken user by user and comes with its margin; NaN unless both were measured alike on the same users.
        """
        ours, theirs = (self.scores[run].by_user if run in self.comparable else None for run in (name, self.first))
        if ours is None or theirs is None or ours.part != theirs.part:
            return math.nan, math.nan
        if not np.array_equal(ours.users, theirs.users):
            return math.nan, math.nan
        if system is not None and system not in ours.positions:
            return math.nan, math.nan
        value, amount = difference_of(theirs, ours, metric, other=system or ours.main)
        return (-value if value else value), amount

    @functools.cached_property
    def problems(self) -> list[str]:
        """Sentences about what cannot be read or compared."""
        found = [f"{name}: {problem}" for name, run in self.runs.items() for problem in run.problems]
        for name in self.runs:
            if name not in self.scores:
                remedy = f"Evaluate it with: turbogr evaluate {self.runs[name].path}"
                found.append(f"{name} has not been evaluated at its end. {remedy}")
        others = [name for name in self.runs if not self.is_same_data(name)]
        if others:
            found.append(f"Not the data of {self.first}, so metrics cannot be compared: {', '.join(others)}.")
        protocols = {_rule(self.runs[name]) for name in self.scores if name not in others}
        if len(protocols) > 1 or len({scores.part for scores in self.scores.values()}) > 1:
            found.append("The runs were not measured by the same protocol; each one's own report states it.")
        return found


def _rule(run: RunData) -> str:
    """Return the protocol without the checkpoint, which is the last thing that it names."""
    return str((run.evaluation or {}).get("protocol")).rpartition("; ")[0]


def summary(page: Comparison) -> Section:
    """The best run by the first metric, whether its lead is more than chance, and all runs as bars."""
    context: dict[str, Any] = {"title": f"{len(page.runs)} runs", "sentences": [], "note": "", "figure": None}
    if page.scores:
        metric = page.main_metrics[0]
        context["sentences"] = _verdicts(page, metric)
        context["figure"] = _bars(page, metric)
        best = _best(page, metric)
        context["note"] = _not_beaten(page, metric, best)
        value = wording.metric_value(metric, page.scores[best].main_values[metric.name])
        several = f"is best of {len(page.comparable)} runs by {metric.title}: {value}"
        context["title"] = f"{best} {several if len(page.comparable) > 1 else f'has {metric.title} {value}'}"
    return Section("result", "Result", "comparison_result.html", context)


def _best(page: Comparison, metric: MetricInfo) -> str:
    """The best of the runs that can be compared; of all runs where none of these has the metric."""
    names = [name for name in page.scores if metric.name in page.scores[name].main_values]
    names = [name for name in names if name in page.comparable] or names
    best = metric.best([page.scores[name].main_values[metric.name] for name in names])
    assert best is not None, "the metric is one of those that were measured"
    return names[best]


def _not_beaten(page: Comparison, metric: MetricInfo, best: str) -> str:
    """Return a sentence about a simple method that is as good as the best run; empty where there is none."""
    baseline = _best_baseline(page, metric)
    if baseline is None:
        return ""
    run, name = baseline
    value = page.scores[run].systems[name][metric.name]
    if metric.is_better(page.scores[best].main_values[metric.name], value):
        return ""
    return f"No run beats {PHRASES.get(name, name)} ({wording.metric_value(metric, value)}) by {metric.title}."


def _verdicts(page: Comparison, metric: MetricInfo) -> list[str]:
    """Return how each run differs from the first, in words."""
    sentences = []
    words = {"better": "is better", "worse": "is worse", "noise": "differs by no more than chance may"}
    for name in list(page.runs)[1:]:
        value, amount = page.difference(name, metric.name)
        if value == amount == 0:
            sentences.append(f"{name} gives every user the same {metric.title} as {page.first}.")
        elif math.isfinite(amount):
            outcome = verdict(value, amount, higher_is_better=metric.higher_is_better)
            by = f"{metric.title} {signed(value)} {plus_minus(amount)}, user by user"
            sentences.append(f"{name} {words[outcome]}, compared with {page.first}: {by}.")
    return sentences


def _bars(page: Comparison, metric: MetricInfo) -> Figure:
    measured = {name: scores for name, scores in page.scores.items() if metric.name in scores.main_values}
    bars = {name: scores.main_values[metric.name] for name, scores in measured.items()}
    errors = [scores.margin(scores.main, metric.name) for scores in measured.values()]
    slots = [list(page.runs).index(name) for name in bars]
    baseline = _best_baseline(page, metric)
    if baseline is not None:
        run, name = baseline
        bars[system_title(page.runs[run], name)] = page.scores[run].systems[name][metric.name]
        errors.append(page.scores[run].margin(name, metric.name))
        slots.append(5)
    axis = Axis(metric.unit, format=lambda value: wording.metric_value(metric, value), zero=True)
    title = f"{metric.title} on the {part_name(next(iter(measured.values())).part)}"
    return Figure.draw(
        lambda width: bar_chart(bars, title=title, axis=axis, slots=slots, errors=errors, width=width),
        direction(metric),
    )


def _best_baseline(page: Comparison, metric: MetricInfo) -> tuple[str, str] | None:
    """Return (run, baseline) of the best baseline that was measured on the data of the first run."""
    found = [(run, name) for name, run in page.baselines.items() if metric.name in page.scores[run].systems[name]]
    best = metric.best([page.scores[run].systems[name][metric.name] for run, name in found])
    return None if best is None else found[best]


def metrics(page: Comparison) -> Section:
    """All runs and the baselines in one table, with confidence intervals and differences user by user."""
    metrics = page.main_metrics
    differences = bool(metrics) and any(
        math.isfinite(page.difference(name, metrics[0].name)[1]) for name in list(page.runs)[1:]
    )
    rows = [{"title": name, "cells": _cells(page, name, metrics, differences)} for name in page.runs]
    for name in _ordered_baselines(page, metrics):
        run = page.baselines[name]
        cells = [_cell(page.scores[run], name, metric, math.nan) for metric in metrics]
        cells += [_difference_cell(page, run, metrics[0], name)] if differences else []
        rows.append({"title": system_title(page.runs[run], name), "cells": cells})
    heads = [{"title": metric.title, "lower_is_better": not metric.higher_is_better} for metric in metrics]
    if differences:
        heads.append({"title": f"{metrics[0].title} against {page.first}", "lower_is_better": False})
    explained = [INTERVAL] if any(any(scores.errors.values()) for scores in page.scores.values()) else []
    if differences:
        explained.append("Differences are taken user by user; where the interval has 0 in it, it may be chance.")
    table = {"heads": heads, "rows": rows}
    wide = _all_metrics(page) if len(page.metrics) > len(metrics) else None
    context = {"table": table, "all": wide, "explained": " ".join(explained), "missing": not metrics}
    return Section("metrics", "Metrics", "comparison_metrics.html", context)


def _all_metrics(page: Comparison) -> dict[str, Any]:
    rows = [{"title": name, "cells": _cells(page, name, page.metrics, False)} for name in page.runs]
    return {"heads": [metric.title for metric in page.metrics], "rows": rows}


def _cells(page: Comparison, name: str, metrics: list[MetricInfo], differences: bool) -> list[dict[str, str]]:
    scores = page.scores.get(name)
    cells = []
    for metric in metrics:
        best = page.scores[_best(page, metric)].main_values[metric.name] if name in page.comparable else math.nan
        cells.append(_NOT_MEASURED if scores is None else _cell(scores, scores.main, metric, best))
    return [*cells, _difference_cell(page, name, metrics[0])] if differences else cells


def _ordered_baselines(page: Comparison, metrics: list[MetricInfo]) -> list[str]:
    """Return the baselines by the first metric, the best first."""
    if not metrics:
        return []
    sign = -1 if metrics[0].higher_is_better else 1
    values = {name: page.scores[run].systems[name].get(metrics[0].name) for name, run in page.baselines.items()}
    return sorted(values, key=lambda name: math.inf if values[name] is None else sign * (values[name] or 0.0))


def _difference_cell(page: Comparison, name: str, metric: MetricInfo, system: str | None = None) -> dict[str, str]:
    if name == page.first and system is None:
        return {"text": "reference", "margin": "", "class": "plain"}
    value, amount = page.difference(name, metric.name, system)
    if not math.isfinite(amount):
        if name in page.comparable or name not in page.scores:
            return _NOT_MEASURED
        return {"text": "other protocol" if page.is_same_data(name) else "other data", "margin": "", "class": "plain"}
    outcome = verdict(value, amount, higher_is_better=metric.higher_is_better)
    return {"text": signed(value), "margin": plus_minus(amount), "class": outcome}


def _cell(scores: Scores, system: str, metric: MetricInfo, best: float) -> dict[str, str]:
    value = scores.systems[system].get(metric.name, math.nan)
    if not math.isfinite(value):
        return _NOT_MEASURED
    amount = plus_minus(scores.margin(system, metric.name))
    return {"text": f"{value:.4f}", "margin": amount, "class": "best" if value == best else ""}


def groups(page: Comparison) -> Section | None:
    """One metric by kinds of users, a column per run; None unless runs have results of the same users."""
    first = page.scores[page.first].by_user if page.first in page.scores else None
    metric = next((metric for metric in page.main_metrics if has_user_values(metric.name)), None)
    if first is None or metric is None:
        return None
    same = {
        name: scores.by_user
        for name, scores in page.scores.items()
        if scores.by_user is not None and name in page.comparable and np.array_equal(scores.by_user.users, first.users)
    }
    tables = []
    for title, named in split_groups(first).items():
        rows = []
        for group_name, group in named:
            found = [group_score(by_user, group, by_user.main, metric.name) for by_user in same.values()]
            cells = [{"text": f"{s.value:.4f}", "margin": plus_minus(s.margin), "class": ""} for s in found]
            users = {"text": wording.count(group.num_users), "margin": "", "class": "plain"}
            rows.append({"title": group_name, "cells": [users, *cells]})
        heading = f"{metric.title} {title[0].lower()}{title[1:]}"
        tables.append({"title": heading, "first": "group", "heads": ["users", *same], "rows": rows})
    return Section("groups", "Who they work for", "comparison_tables.html", {"tables": tables, "explained": INTERVAL})


def learning(page: Comparison) -> Section:
    """The loss and the validation metrics of all runs over each other."""
    figures = []
    losses = [
        thinned(name, wording.column(run.training, "step"), wording.column(run.training, "loss"), slot=slot)
        for slot, (name, run) in enumerate(page.runs.items())
        if run.training
    ]
    if losses:
        lines = [Series(one.name, one.x, one.y, slot=one.slot) for one in losses]  # bands would hide each other
        figures.append(line_figure(lines, "Training loss", Axis("step"), Axis()))
    for metric in page.main_metrics or _measured_in_training(page):
        found = [_curve(page, name, metric, slot) for slot, name in enumerate(page.runs)]
        curves = [curve for curve in found if curve is not None]
        if curves:
            y = Axis(format=wording.metric_axis_format(metric), zero=True)
            title = f"{metric.title} during training"
            figures.append(line_figure(curves, title, Axis("epoch"), y, caption=direction(metric)))
    missing = "" if figures else "These runs have recorded neither training steps nor evaluations yet."
    return Section("learning", "Learning", "figures.html", {"figures": figures, "missing": missing})


def _measured_in_training(page: Comparison) -> list[MetricInfo]:
    run = page.runs[page.first]
    return one_per_family(run.folder.describe_metrics({name for r in run.evaluations for name in metrics_of(r)}))[:3]


def _curve(page: Comparison, name: str, metric: MetricInfo, slot: int) -> Series | None:
    records = [record for record in page.runs[name].evaluations if metric.name in metrics_of(record)]
    parts = {str(record.get("part", "")) for record in records}
    part = "valid" if "valid" in parts else min(parts, default="")
    records = [record for record in records if str(record.get("part", "")) == part]
    xs, ys = wording.column(records, "epoch"), wording.column(records, metric.name)
    return Series(name, xs, ys, slot=slot) if records and all(map(math.isfinite, xs)) else None


def differences(page: Comparison) -> Section:
    """The settings in which the runs differ, and what each run is."""
    settings = [_flat(run.config) for run in page.runs.values()]
    keys = dict.fromkeys(key for found in settings for key in found)
    differing = [key for key in keys if len({found.get(key, "unset") for found in settings}) > 1]
    rows = [_setting_row(key, [found.get(key, "unset") for found in settings]) for key in differing]
    facts = [_facts(run) for run in page.runs.values()]
    about = [_setting_row(name, [found[name] for found in facts]) for name in facts[0]]
    tables = [{"title": "The runs", "first": "fact", "heads": list(page.runs), "rows": about}]
    if rows:
        tables.append({"title": "Settings that differ", "first": "setting", "heads": list(page.runs), "rows": rows})
    explained = "" if rows else "All settings are the same."
    return Section("settings", "What differs", "comparison_tables.html", {"tables": tables, "explained": explained})


def _setting_row(title: str, values: list[str]) -> dict[str, Any]:
    return {"title": title, "cells": [{"text": value, "margin": "", "class": ""} for value in values]}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the settings by their name for --set, as text."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: written_setting(value)}
    return found


def _facts(run: RunData) -> dict[str, str]:
    """Return what a run is; unknown is written as such, so that no cell is empty."""
    last = run.training[-1] if run.training else {}
    facts = {
        "model": model_title(run),
        "parameters": wording.count(run.part("model").get("num_dense_parameters")),
        "events of the data": wording.count(run.part("data").get("num_events")),
        "steps": wording.count(last.get("step")),
        "time of training": wording.duration(last.get("elapsed")),
        "status": str(run.info.get("status") or "unknown"),
    }
    return {name: "unknown" if value == wording.MISSING else value for name, value in facts.items()}
