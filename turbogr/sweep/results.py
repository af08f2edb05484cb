"""What the runs of a sweep are worth: a table over repetitions with their spread, and the curves.

A finished run counts with the test metrics of its best checkpoint (its summary.json); one that is not finished with its
best evaluation so far, which is on the validation item where the split has one: the table says what a line is measured
on, and no mean is taken over different parts. Runs that differ only in `train.seed` are repetitions: their mean is
given with the standard deviation between them. Below them stand the baselines that finished runs were measured beside.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from turbogr.bench.record import Table
from turbogr.config import load_config
from turbogr.report.charts import Axis, Series, line_chart
from turbogr.sweep.grid import Cell
from turbogr.train.summary import read_summary

_ITEMS = {"test": "test", "valid": "validation"}


@dataclass(frozen=True)
class Run:
    """One run: its metrics, and its curve as a list of values by name of the metric, beside `epoch`.

    `part`, test or valid, is what the metrics are measured on; `chosen_on` that of the curve, whose best value of
    `metric` chose the epoch.
    """

    name: str
    group: tuple[str, str]
    finished: bool
    metrics: dict[str, float]
    protocol: str | None
    curve: dict[str, list[float]] = field(default_factory=dict)
    part: str = "test"
    chosen_on: str = "test"
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    metric: str = "hr@10"

    @property
    def best_epoch(self) -> float:
        values = self.curve[self.metric]
        return self.curve["epoch"][values.index(max(values))]


@dataclass(frozen=True)
class Baseline:
    """What needs no training, on the items and users that runs of `settings` were measured on."""

    name: str
    settings: str
    part: str
    metrics: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """The runs of a sweep that have been evaluated at least once; their curves are drawn by `metric`."""

    metric: str
    runs: Sequence[Run]

    def groups(self) -> dict[tuple[str, str], list[Run]]:
        """Runs by recipe and settings other than the seed, in the order of the sweep."""
        groups: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups

    def shown_metrics(self) -> list[str]:
        """The metrics that all runs have, which are the columns of the table."""
        return [name for name in self.runs[0].metrics if all(name in run.metrics for run in self.runs)]

    def baselines(self) -> list[Baseline]:
        """Every baseline once, or once for each of the settings that change what it is worth, as those of data do.

        Runs may be measured at other cut-offs: a baseline is the same where the metrics that the table shows are, and
        has those of all its runs.
        """
        shown = self.shown_metrics()
        found: dict[tuple[Any, ...], Baseline] = {}
        for run in self.runs:
            for name, metrics in run.baselines.items():
                worth = (name, run.part, *(metrics.get(metric) for metric in shown))
                known = found.setdefault(worth, Baseline(name, run.group[1], run.part, {}))
                found[worth] = replace(known, metrics={**metrics, **known.metrics})
        times = Counter(baseline.name for baseline in found.values())
        alone = [replace(each, settings="") if times[each.name] == 1 else each for each in found.values()]
        return sorted(alone, key=lambda baseline: list(times).index(baseline.name))

    def table(self) -> Table:
        """Mean and spread of every metric that all runs have, a line for each group and part it is measured on, and
        one for each baseline."""
        names = self.shown_metrics()
        settings = any(label for _, label in self.groups())
        one_metric = len({run.metric for run in self.runs}) == 1
        rows: list[list[str]] = []
        for (recipe, label), group in self.groups().items():
            for runs in _by_part(group):
                open_runs = sum(not run.finished for run in runs)
                count = f"{len(runs)}" + (f" ({open_runs} not finished)" if open_runs else "")
                chosen_by = "" if one_metric else f", {runs[0].metric}"
                parts = [_ITEMS[runs[0].part], _ITEMS[runs[0].chosen_on] + chosen_by]
                epochs = [run.best_epoch for run in runs]
                whole = all(epoch.is_integer() for epoch in epochs)
                best = _mean_and_spread(epochs, digits=0 if whole else 2)
                cells = [_mean_and_spread([run.metrics[name] for run in runs]) for name in names]
                rows.append([recipe, *([label or "-"] if settings else []), count, *parts, best, *cells])
        for baseline in self.baselines():
            cells = [f"{baseline.metrics[name]:.4f}" if name in baseline.metrics else "-" for name in names]
            with_settings = [baseline.settings or "-"] if settings else []
            rows.append([baseline.name, *with_settings, "-", _ITEMS[baseline.part], "-", "-", *cells])
        told = ["runs", "measured on", "epoch chosen on", "best epoch"]
        columns = ["recipe", *(["settings"] if settings else []), *told, *names]
        return Table("Mean over runs ± standard deviation between them", columns, rows)

    def plot(self) -> str:
        """The metric by epoch, a line for each group with the range of its runs as a band.

        Runs of a group that were never evaluated at the same epoch are a line each; those without the metric have none.
        """
        series = []
        for group, all_runs in self.groups().items():
            runs = [run for run in all_runs if self.metric in run.curve]
            if not runs:
                continue
            epochs = _common([run.curve["epoch"] for run in runs])
            if not epochs:
                series += [Series(run.name, run.curve["epoch"], run.curve[self.metric]) for run in runs]
                continue
            columns = [dict(zip(run.curve["epoch"], run.curve[self.metric], strict=True)) for run in runs]
            values = [[column[epoch] for column in columns] for epoch in epochs]
            low, high = ([min(at) for at in values], [max(at) for at in values]) if len(runs) > 1 else (None, None)
            name = " ".join(part for part in group if part)
            series.append(Series(name, epochs, [statistics.fmean(at) for at in values], low, high))
        parts = " or ".join(dict.fromkeys(_ITEMS[run.chosen_on] for run in self.runs))
        title = f"{self.metric} by epoch on the {parts} item"
        return line_chart(series, title=title, x=Axis("epoch"), y=Axis(self.metric))

    def record(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "metric": self.metric,
            "protocols": sorted({run.protocol for run in self.runs if run.protocol}),
            "runs": [
                {
                    "name": run.name,
                    "recipe": run.group[0],
                    "settings": run.group[1],
                    "finished": run.finished,
                    "part": run.part,
                    "chosen_on": run.chosen_on,
                    "chosen_by": run.metric,
                    "best_epoch": run.best_epoch,
                    "metrics": run.metrics,
                    "curve": run.curve,
                }
                for run in self.runs
            ],
            "baselines": [asdict(baseline) for baseline in self.baselines()],
        }


def compare(cells: Sequence[Cell], out: Path) -> Comparison | None:
    """Read the runs of a sweep; None when none has been evaluated yet."""
    metric = None
    runs = []
    for cell in cells:
        folder = out / cell.name
        if not (folder / "metrics.jsonl").exists():
            continue
        run = _read(cell, folder, load_config(folder / "config.yaml").evaluate.metric)
        if run is not None:
            metric = metric or run.metric
            runs.append(run)
    return Comparison(metric, runs) if metric and runs else None


def _read(cell: Cell, folder: Path, metric: str) -> Run | None:
    evaluations = [record for record in _records(folder / "metrics.jsonl") if metric in record]
    if not evaluations:
        return None
    chosen_on = evaluations[-1]["part"]  # a run that was resumed may have been evaluated on another part before
    evaluations = [record for record in evaluations if record["part"] == chosen_on]
    names = [name for name in evaluations[0] if "@" in name or name == "mrr"]
    curve = {name: [round(float(record[name]), 6) for record in evaluations] for name in ("epoch", *names)}
    summary = read_summary(folder)
    if summary is not None:
        metrics = {name: summary["metrics"][name] for name in names if name in summary["metrics"]}
        measured = str(summary["protocol"]).rpartition(";")[0]
        protocol = f"{measured}; the epoch is chosen on the {_ITEMS[chosen_on]} item"
        baselines = summary.get("baselines", {})
        return Run(cell.name, cell.group, True, metrics, protocol, curve, summary["part"], chosen_on, baselines, metric)
    best = max(evaluations, key=lambda record: record[metric])
    metrics = {name: best[name] for name in names}
    return Run(cell.name, cell.group, False, metrics, None, curve, chosen_on, chosen_on, metric=metric)


def _by_part(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs whose metrics belong into one mean, those measured on the test item first."""
    kinds = sorted({(run.part, run.chosen_on) for run in runs})
    return [[run for run in runs if (run.part, run.chosen_on) == kind] for kind in kinds]


def _records(path: Path) -> Iterable[Mapping[str, Any]]:
    """Evaluations in the order of steps; a resumed run may have repeated one, and a killed one left half a line."""
    by_step: dict[int, Mapping[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("kind") == "eval":
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def _common(epochs: Sequence[Sequence[float]]) -> list[float]:
    """Epochs at which all runs were evaluated."""
    return sorted(set(epochs[0]).intersection(*epochs[1:]))


def _mean_and_spread(values: Sequence[float], digits: int = 4) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
