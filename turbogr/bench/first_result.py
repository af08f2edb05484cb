"""What someone with a new log gets: `quickstart` on many logs against the simple methods, three seeds each.

Claim: what `quickstart` delivers is no worse than the best simple method of each log, and better on average.
Compared with: the best of the summary's baselines, by the mean of HR@10 and of NDCG@10; settings chosen on validation.
Keys: `mean_ratio_hr` and `mean_ratio_ndcg` (mean over logs of delivered / best baseline, the subsets of a log counting
together as one), `worst_margin` (smallest (delivered - best baseline) / standard error of the paired difference over
all logs and both metrics; at least -1 is the aim), `num_logs`, and for every log L its `L_users`, `L_items` and
`L_events`, for both metrics `L_ratio_hr`, `L_margin_hr`, `L_delivered_hr`, `L_model_hr` (the network alone) and
`L_METHOD_hr` for every simple method. With one job at a time also `most_seconds`, the longest training of a log up to
400,000 events; with more they share the cores.

`--set stores=DIR,DIR` names prepared stores; subsets of `users` users are drawn from each by a fixed seed. Runs are
kept in `out` and not repeated, so an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from turbogr.bench.record import Cell, Result, Table
from turbogr.data.prepare.preparation import prepare
from turbogr.data.ranges import concatenated_ranges
from turbogr.data.split import LEAVE_TWO_OUT
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.metrics import user_values
from turbogr.evaluation.user_positions import UserPositions
from turbogr.plot import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "stores": [""],  # prepared stores
    "users": [500, 1000, 3000],  # sizes of the subsets that are drawn from each store
    "logs": [""],  # only these stores and subsets, by name; unset: all
    "most_events": 10**12,  # stores and subsets with more are left out
    "seeds": [0, 1, 2],
    "recipe": "quickstart",
    "set": [""],  # settings of the recipe to change, section.key=value
    "jobs": 1,  # runs at the same time, which share the cores; with more than one, seconds mean little
    "out": "runs/first-result",
}

METRICS = {"hr": "hr@10", "ndcg": "ndcg@10"}
SHORT_LOG = 400_000
_LEAST_ERROR = 1e-9  # where a baseline is what is delivered, no user differs


@dataclass(frozen=True)
class LogResult:
    """The runs of one log. By short name of the metric: the delivered mean over seeds, the network's, the baselines' by
    name, and the standard error of the paired difference by user to the best of them."""

    name: str
    family: str
    store: Store
    delivered: list[str]
    values: dict[str, float]
    model_values: dict[str, float]
    baselines: dict[str, dict[str, float]]
    errors: dict[str, float]
    seconds: float

    def best(self, metric: str) -> tuple[str, float]:
        """The best baseline and its value."""
        return max(self.baselines[metric].items(), key=lambda item: item[1])

    def ratio(self, metric: str) -> float:
        best = self.best(metric)[1]
        return self.values[metric] / best if best else float("inf")

    def margin(self, metric: str) -> float:
        """How far the delivered value lies above the best baseline's, in standard errors."""
        difference = self.values[metric] - self.best(metric)[1]
        return difference / max(self.errors[metric], _LEAST_ERROR)


def run(settings: Mapping[str, Any]) -> Result:
    """Train on every log, or take the runs that are there, and compare.

    Raises:
        UserError: no stores, one that is not a store, or a training run that failed.
    """
    stores = [Path(path) for path in settings["stores"] if path]
    if not stores:
        raise UserError("name the prepared stores to train on: --set stores=data/one,data/two")
    out = Path(settings["out"])
    logs = [
        (name, path.name, part)
        for path in stores
        for name, part in _logs(Store.open(path), path.name, settings, out)
        if part.num_events <= settings["most_events"]
    ]
    missing = set(filter(None, settings["logs"])) - {name for name, _, _ in logs}
    if missing or not logs:
        what = f"of the name {min(missing)} is there and" if missing else "of the stores and their subsets"
        raise UserError(f"no log {what} has at most most_events={settings['most_events']} events; see stores and users")
    _train_all(logs, settings, out)
    results = [_measure(name, family, part, settings, out / "runs" / name) for name, family, part in logs]
    timed = settings["jobs"] == 1
    notes = [] if timed else ["several runs shared the cores, so how long they took is not a figure"]
    return Result(figures(results, timed=timed), [_table(results)], {"first-result": _plot(results)}, notes)


def _logs(store: Store, name: str, settings: Mapping[str, Any], out: Path) -> list[tuple[str, Store]]:
    """The store and its subsets, by name, those that are wanted."""
    wanted = set(filter(None, settings["logs"]))
    found = [(name, store)] if not wanted or name in wanted else []
    for size in settings["users"]:
        subset = f"{name}-{size}"
        if size < store.num_users and (not wanted or subset in wanted):
            found.append((subset, _subset(store, size, out / "data" / subset)))
    return found


def _subset(store: Store, size: int, out: Path) -> Store:
    """Return the store of some users, drawn by a fixed seed; it is made where it is not there."""
    if not (out / "manifest.json").exists():
        users = np.sort(np.random.default_rng(0).choice(store.num_users, size, replace=False))
        lengths = store.lengths[users]
        events = concatenated_ranges(np.asarray(store.offsets)[users], lengths)
        columns = {
            "user_id": store.user_ids.decode(np.repeat(users, lengths)),
            "item_id": store.item_ids.decode(store.items[events]),
        }
        has_times = store.manifest.times == "real"
        if has_times:
            columns["timestamp"] = np.asarray(store.times[events])
        out.parent.mkdir(parents=True, exist_ok=True)
        prepare(pa.table(columns), out=out, time_column=None if has_times else "none", split=LEAVE_TWO_OUT)
    return Store.open(out)


def _measure(name: str, family: str, store: Store, settings: Mapping[str, Any], runs: Path) -> LogResult:
    summaries, positions = [], []
    for seed in settings["seeds"]:
        run = runs / f"seed-{seed}"
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        summaries.append(summary)
        positions.append(UserPositions.read(run, summary["part"], summary["step"]))
    baselines = {short: _baselines(summaries, metric) for short, metric in METRICS.items()}
    best = {short: max(values, key=lambda name: values[name]) for short, values in baselines.items()}
    return LogResult(
        name,
        family,
        store,
        [str(summary["delivered"]) for summary in summaries],
        {short: _mean(summaries, "metrics", metric) for short, metric in METRICS.items()},
        {short: _mean(summaries, "model_metrics", metric) for short, metric in METRICS.items()},
        baselines,
        {short: _paired_error(positions, best[short], metric) for short, metric in METRICS.items()},
        float(np.mean([summary["wall_seconds"] for summary in summaries])),
    )


def _train_all(logs: Sequence[tuple[str, str, Store]], settings: Mapping[str, Any], out: Path) -> None:
    """Train on every log with every seed, short logs first and `jobs` at a time. The first failure ends it when running
    ones are done."""
    with ThreadPoolExecutor(max(1, int(settings["jobs"]))) as pool:
        runs = [
            pool.submit(_train, store, out / "runs" / name / f"seed-{seed}", seed, settings)
            for name, _, store in sorted(logs, key=lambda log: log[2].num_events)
            for seed in settings["seeds"]
        ]
        try:
            for run in runs:
                run.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _train(store: Store, run: Path, seed: int, settings: Mapping[str, Any]) -> None:
    """Train unless the run is complete; one that was interrupted goes on."""
    if (run / "summary.json").exists():
        return
    overrides = [f"train.seed={seed}", "train.tensorboard=false", f"data.split={LEAVE_TWO_OUT}"]
    if settings["jobs"] > 1:
        overrides.append(f"train.threads={max(1, torch.get_num_threads() // settings['jobs'])}")
    overrides += [text for text in settings["set"] if text]
    command = [sys.executable, "-m", "turbogr", "train", settings["recipe"], "--data", str(store.path)]
    command += ["--out", str(run), "--resume", *(part for text in overrides for part in ("--set", text))]
    run.parent.mkdir(parents=True, exist_ok=True)
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise UserError(f"training on {store.path} failed: {found.stderr.strip().splitlines()[-1]}")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)  # dozens of runs; their results are what counts


def _mean(summaries: Sequence[Mapping[str, Any]], key: str, metric: str) -> float:
    return float(np.mean([summary[key][metric] for summary in summaries]))


def _baselines(summaries: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    names = summaries[0]["baselines"]
    return {name: float(np.mean([summary["baselines"][name][metric] for summary in summaries])) for name in names}


def _paired_error(positions: Sequence[UserPositions | None], baseline: str, metric: str) -> float:
    """Return the standard error of the difference by user, the delivered value of a user being the mean over seeds."""
    known = [found for found in positions if found is not None]
    assert len(known) == len(positions), "a retrieval run keeps the positions of its users"
    ours = np.mean([user_values(found.positions[found.main], metric) for found in known], axis=0)
    difference = ours - user_values(known[0].positions[baseline], metric)
    return float(difference.std(ddof=1) / np.sqrt(len(difference)))


def figures(results: Sequence[LogResult], *, timed: bool = True) -> dict[str, float]:
    """Return the keys of the record; with `timed` also how long training took."""
    found: dict[str, float] = {"num_logs": float(len(results))}
    for result in results:
        store = result.store
        found[f"{result.name}_users"] = float(store.num_users)
        found[f"{result.name}_items"] = float(store.num_items)
        found[f"{result.name}_events"] = float(store.num_events)
    for short in METRICS:
        families = defaultdict(list)
        for result in results:
            families[result.family].append(result.ratio(short))
            found[f"{result.name}_ratio_{short}"] = result.ratio(short)
            found[f"{result.name}_margin_{short}"] = result.margin(short)
            found[f"{result.name}_delivered_{short}"] = result.values[short]
            found[f"{result.name}_model_{short}"] = result.model_values[short]
            for method, value in result.baselines[short].items():
                found[f"{result.name}_{method}_{short}"] = value
        found[f"mean_ratio_{short}"] = float(np.mean([np.mean(ratios) for ratios in families.values()]))
    found["worst_margin"] = min(result.margin(short) for result in results for short in METRICS)
    short_logs = [result.seconds for result in results if result.store.num_events <= SHORT_LOG]
    if timed and short_logs:
        found["most_seconds"] = max(short_logs)
    return found


def _table(results: Sequence[LogResult]) -> Table:
    columns = [
        "log",
        "users",
        "items",
        "events",
        "HR@10",
        "model alone",
        "best baseline",
        "its HR@10",
        "ratio",
        "NDCG ratio",
    ]
    columns += ["least margin (SE)", "seconds", "delivered (first seed)"]
    rows: list[list[Cell]] = []
    for result in results:
        store, (name, value) = result.store, result.best("hr")
        sizes: list[Cell] = [result.name, store.num_users, store.num_items, store.num_events]
        values: list[Cell] = [result.values["hr"], result.model_values["hr"], name, value]
        margin = min(result.margin(short) for short in METRICS)
        ratios: list[Cell] = [result.ratio("hr"), result.ratio("ndcg"), margin]
        rows.append([*sizes, *values, *ratios, result.seconds, result.delivered[0]])
    return Table("What quickstart delivers against the best simple method, mean of the seeds", columns, rows)


def _plot(results: Sequence[LogResult]) -> str:
    series = {
        "delivered": [result.values["hr"] for result in results],
        "model alone": [result.model_values["hr"] for result in results],
        "best simple method": [result.best("hr")[1] for result in results],
    }
    title = "HR@10 of quickstart on logs nobody tuned for"
    return grouped_bar_chart([result.name for result in results], series, title=title, y=Axis("HR@10"))
