"""The results of a sweep: a table of means over repetitions with their spread, and the learning curves.

A finished run counts with the metrics of its summary.json: those of its best checkpoint on the test items. A run that
is not finished counts with its best evaluation so far, which is on the validation items if the split has any. The table
says what each line is measured on, and no mean is taken over different parts. Runs that differ only in `train.seed` are
repetitions; the table has their mean and the standard deviation between them, and below all runs the baselines.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from turbogr.bench.record import Table
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.plot import Axis, Series, line_chart
from turbogr.runs import MetricLog, RunFolder, metrics_of, protocol_text
from turbogr.sweep.grid import Cell
from turbogr.training.run_summary import read_summary

_PARTS = {"test": "test", "valid": "validation"}


@dataclass(frozen=True)
class RunResult:
    """One run: its metrics by name, and its curve, a list of values by name of the metric and for "epoch".

    The metrics are measured on `part`, test or valid. The best value of `metric` on the part `chosen_on`, that of the
    curve, chose the epoch. `delivered` names what the metrics are of where that is not the model. `described` has the
    descriptions of the metrics in the order of the table.
    """

    name: str
    group: tuple[str, str]
    finished: bool
    metric: MetricInfo
    described: Sequence[MetricInfo]
    metrics: dict[str, float]
    protocol: str | None
    curve: dict[str, list[float]] = field(default_factory=dict)
    part: str = "test"
    chosen_on: str = "test"
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    delivered: str | None = None

    @property
    def best_epoch(self) -> float:
        """The epoch at which the metric that chose the checkpoint was best."""
        best = self.metric.best(self.curve[self.metric.name])
        assert best is not None, "an evaluated run has a value of its metric"
        return self.curve["epoch"][best]


@dataclass(frozen=True)
class Baseline:
    """The metrics of a baseline, on the same data as runs of `settings`."""

    name: str
    settings: str
    part: str
    metrics: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """The runs of a sweep that have been evaluated at least once; `metric` is the one whose curves are drawn."""

    metric: MetricInfo
    runs: Sequence[RunResult]

    def groups(self) -> dict[tuple[str, str], list[RunResult]]:
        """Runs by recipe and settings other than the seed, in the order of the sweep."""
        groups: dict[tuple[str, str], list[RunResult]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups

    def shown_metrics(self) -> list[MetricInfo]:
        """The metrics that all runs have, which are the columns of the table."""
        return [metric for metric in self.runs[0].described if all(metric.name in run.metrics for run in self.runs)]

    def baselines(self) -> list[Baseline]:
        """Every baseline once, or once for each of the settings that change its metrics, as settings of the data do.

        Runs may have different metrics. Baselines with equal values in the table are one baseline, with the metrics of
        all its runs.
        """
        shown = self.shown_metrics()
        found: dict[tuple[Any, ...], Baseline] = {}
        for run in self.runs:
            for name, metrics in run.baselines.items():
                values = (name, run.part, *(metrics.get(metric.name) for metric in shown))
                known = found.setdefault(values, Baseline(name, run.group[1], run.part, {}))
                found[values] = replace(known, metrics={**metrics, **known.metrics})
        times = Counter(baseline.name for baseline in found.values())
        alone = [replace(each, settings="") if times[each.name] == 1 else each for each in found.values()]
        return sorted(alone, key=lambda baseline: list(times).index(baseline.name))

    def table(self) -> Table:
        """Mean and spread of every metric that all runs have.

        There is a line for each group and part that it is measured on, and one for each baseline.
        """
        shown = self.shown_metrics()
        settings = any(label for _, label in self.groups())
        one_metric = len({run.metric.name for run in self.runs}) == 1
        rows: list[list[str]] = []
        for (recipe, label), group in self.groups().items():
            for runs in _by_part(group):
                unfinished = sum(not run.finished for run in runs)
                count = f"{len(runs)}" + (f" ({unfinished} not finished)" if unfinished else "")
                chosen_by = "" if one_metric else f", {runs[0].metric.title}"
                parts = [_PARTS[runs[0].part], _PARTS[runs[0].chosen_on] + chosen_by]
                epochs = [run.best_epoch for run in runs]
                whole = all(epoch.is_integer() for epoch in epochs)
                best = _mean_and_spread(epochs, digits=0 if whole else 2)
                cells = [_mean_and_spread([run.metrics[metric.name] for run in runs]) for metric in shown]
                rows.append([recipe, *([label or "-"] if settings else []), count, *parts, best, *cells])
        for baseline in self.baselines():
            values = [baseline.metrics.get(metric.name) for metric in shown]
            cells = ["-" if value is None else f"{value:.4f}" for value in values]
            with_settings = [baseline.settings or "-"] if settings else []
            rows.append([baseline.name, *with_settings, "-", _PARTS[baseline.part], "-", "-", *cells])
        about = ["runs", "measured on", "epoch chosen on", "best epoch"]
        columns = ["recipe", *(["settings"] if settings else []), *about, *(metric.title for metric in shown)]
        return Table("Mean over runs ± standard deviation between them", columns, rows)

    def notes(self) -> list[str]:
        """Return sentences about runs whose metrics are not those of their model."""
        return [
            f"{run.name} delivers {run.delivered}, and its metrics are of that; the curve is the model's"
            for run in self.runs
            if run.delivered is not None
        ]

    def plot(self) -> str:
        """The metric by epoch, a line for each group with the range of its runs as a band.

        Runs of a group that were never evaluated at the same epoch are a line each. A run without the metric has none.
        """
        name = self.metric.name
        series = []
        for group, all_runs in self.groups().items():
            runs = [run for run in all_runs if name in run.curve]
            if not runs:
                continue
            epochs = _common([run.curve["epoch"] for run in runs])
            if not epochs:
                series += [Series(run.name, run.curve["epoch"], run.curve[name]) for run in runs]
                continue
            columns = [dict(zip(run.curve["epoch"], run.curve[name], strict=True)) for run in runs]
            values = [[column[epoch] for column in columns] for epoch in epochs]
            low, high = ([min(at) for at in values], [max(at) for at in values]) if len(runs) > 1 else (None, None)
            label = " ".join(part for part in group if part)
            series.append(Series(label, epochs, [statistics.fmean(at) for at in values], low, high))
        parts = " or ".join(dict.fromkeys(_PARTS[run.chosen_on] for run in self.runs))
        title = f"{self.metric.title} by epoch on the {parts} items"
        return line_chart(series, title=title, x=Axis("epoch"), y=Axis(self.metric.title))

    def record(self) -> dict[str, Any]:
        """Return the content of sweep.json."""
        return {
            "metric": self.metric.name,
            "protocols": sorted({run.protocol for run in self.runs if run.protocol}),
            "runs": [
                {
                    "name": run.name,
                    "recipe": run.group[0],
                    "settings": run.group[1],
                    "finished": run.finished,
                    "part": run.part,
                    "chosen_on": run.chosen_on,
                    "chosen_by": run.metric.name,
                    "best_epoch": run.best_epoch,
                    "metrics": run.metrics,
                    "delivered": run.delivered,
                    "curve": run.curve,
                }
                for run in self.runs
            ],
            "baselines": [asdict(baseline) for baseline in self.baselines()],
        }


def compare(cells: Sequence[Cell], out: Path) -> Comparison | None:
    """Read the runs of a sweep; None when none has been evaluated yet."""
    folders = {cell: out / cell.name for cell in cells}
    found = (_read(cell, RunFolder.open(folder)) for cell, folder in folders.items() if _has_metrics(folder))
    runs = [run for run in found if run is not None]
    return Comparison(runs[0].metric, runs) if runs else None


def _has_metrics(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


def _read(cell: Cell, folder: RunFolder) -> RunResult | None:
    name = folder.config().evaluate.metric
    assert name is not None, "a run's config is resolved"
    evaluations = [record for record in MetricLog.read(folder.path).evaluations if name in metrics_of(record)]
    if not evaluations:
        return None
    chosen_on = evaluations[-1]["part"]  # a run that was resumed may have been evaluated on another part before
    evaluations = [record for record in evaluations if record["part"] == chosen_on]
    # A resumed run may have been evaluated by other metrics before.
    described = folder.describe_metrics(set.intersection(*(set(metrics_of(record)) for record in evaluations)))
    metric = next(info for info in described if info.name == name)
    keys = ["epoch", *(info.name for info in described)]
    curve = {key: [round(float(record[key]), 6) for record in evaluations] for key in keys}
    shared = (cell.name, cell.group)
    summary = read_summary(folder.path)
    if summary is None:
        best = metric.best([record[name] for record in evaluations])
        assert best is not None, "only evaluations with the metric are kept"
        metrics = metrics_of(evaluations[best])
        return RunResult(*shared, False, metric, described, metrics, None, curve, chosen_on, chosen_on)
    metrics = {info.name: summary["metrics"][info.name] for info in described if info.name in summary["metrics"]}
    measured = protocol_text(summary).rpartition(";")[0]
    protocol = f"{measured}; the epoch is chosen on the {_PARTS[chosen_on]} item"
    baselines = summary.get("baselines", {})
    return RunResult(
        *shared,
        True,
        metric,
        described,
        metrics,
        protocol,
        curve,
        summary["part"],
        chosen_on,
        baselines,
        _delivered(summary),
    )


def _delivered(summary: Mapping[str, Any]) -> str | None:
    """Return what a run delivers, None where it is the model."""
    is_model = summary.get("model_metrics", summary["metrics"]) == summary["metrics"]
    return None if is_model else str(summary.get("delivered"))


def _by_part(runs: Sequence[RunResult]) -> list[list[RunResult]]:
    """Group the runs that may share a mean: by the part that they are measured on, the test part first."""
    kinds = sorted({(run.part, run.chosen_on) for run in runs})
    return [[run for run in runs if (run.part, run.chosen_on) == kind] for kind in kinds]


def _common(epochs: Sequence[Sequence[float]]) -> list[float]:
    """Epochs at which all runs were evaluated."""
    return sorted(set(epochs[0]).intersection(*epochs[1:]))


def _mean_and_spread(values: Sequence[float], digits: int = 4) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
