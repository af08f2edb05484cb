"""A run that fits a simple method, such as `model: ease`: the same run folder as a trained model's, in one go.

Of several ranks the first fits and measures while the others wait: a method is fitted on the whole log at once.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from typing import Any

import torch

from turbogr import machine, ops
from turbogr.config import dump_config
from turbogr.data.split import Split
from turbogr.evaluation.evaluator import Interrupted
from turbogr.files import replace_text
from turbogr.parallel.consistency import check_shared_folder
from turbogr.parallel.world import World
from turbogr.peak import peak_facts
from turbogr.progress import Progress
from turbogr.runs import FITTED, RunFolder, TrainedModel
from turbogr.simple.method_settings import fixed_settings, with_settings
from turbogr.tasks.method_task import MethodTask
from turbogr.training.checkpoint_selection import selecting_part
from turbogr.training.run_start import RunStart, held_folder, keep_data
from turbogr.training.run_summary import SUMMARY, summary_is_current, write_summary
from turbogr.training.stopping import StopRequest
from turbogr.training.trainer import TrainResult


def fit_method(start: RunStart, world: World) -> TrainResult:
    """Fit the simple method that the config names and write its run folder; all ranks call it together."""
    task = MethodTask(start.config)
    start.record["model"] = {"name": task.method.name, "title": task.method.title, **start.record.get("model", {})}
    if start.config.train.threads is not None:
        torch.set_num_threads(start.config.train.threads)
    ops.set_backend(start.config.train.backend)
    found: list[TrainResult] = []
    with held_folder(start, _environment(world), world) as keep_status:
        check_shared_folder(world, start.run)
        world.run_on_first(lambda: found.append(_fit_and_measure(start, task)))
        result = world.gather_objects(found[0] if found else None)[0]
        assert result is not None, "rank 0 has a result"
        if world.is_first and result.status != "interrupted":
            keep_data(start)
        keep_status(result.status)
    return result


def _environment(world: World) -> dict[str, Any]:
    return {
        "versions": machine.versions(),
        "machine": {**machine.machine_facts(), "device": "cpu", **peak_facts(None)},
        "backends": {},
        "ranks": {"size": world.size, "per_machine": world.local_size},
    }


def _fit_and_measure(start: RunStart, task: MethodTask) -> TrainResult:
    """Fit, choose settings that are unset, and write the summary, unless a finished run is there already."""
    run, progress = start.run, Progress()
    if summary_is_current(run, start.config, progress):
        return TrainResult(run, "finished", 0, None, None)
    (run / SUMMARY).unlink(missing_ok=True)
    split = Split.of(start.store, start.config.data.split)
    started = time.perf_counter()
    with StopRequest() as stop:
        try:
            _fit(start, task, split, stop)
            progress.wall_seconds = time.perf_counter() - started
            value = _measure(start, task, split, progress, stop)
            write_summary(
                run,
                start.config,
                start.store,
                split,
                progress,
                status="finished",
                peak_flops=None,
                should_stop=lambda: bool(stop),
                trained=TrainedModel(RunFolder.open(run), start.config, FITTED, task, {}),
            )
        except Interrupted:
            return TrainResult(run, "interrupted", 0, None, None, int(stop.signal or signal.SIGTERM))
    return TrainResult(run, "finished", 0, 0, value)


def _fit(start: RunStart, task: MethodTask, split: Split, stop: StopRequest) -> None:
    """Fit the method and write the settings that were chosen into config.yaml."""
    name = task.method.name
    given = fixed_settings(name, start.config.options)
    chosen = task.choose(start.store, split, lambda: bool(stop))
    options = with_settings(name, start.config.options, chosen.settings)
    task.config = start.config = dataclasses.replace(start.config, options=options)
    replace_text(start.run / "config.yaml", dump_config(start.config))
    print(_describe(start, chosen.settings, given, split), file=sys.stderr, flush=True)


def _describe(start: RunStart, settings: dict[str, float], given: dict[str, float], split: Split) -> str:
    """Say what was fitted, and which settings were chosen where."""
    title = start.record["model"]["title"]
    lines = [f"{title}: fitted on {start.store.num_items:,} items; split {split.rule}"]
    chosen = {name: value for name, value in settings.items() if name not in given}
    if chosen:
        where = "the validation items" if (split.valid >= 0).any() else "the last training items"
        lines.append(f"chosen on {where}: {', '.join(f'{name} {value:g}' for name, value in chosen.items())}")
    reason = start.record.get("protocol", {}).get("reason")
    few = split.few_users()
    return "\n".join([*lines, *([reason] if reason else []), *([few] if few else [])])


def _measure(start: RunStart, task: MethodTask, split: Split, progress: Progress, stop: StopRequest) -> float:
    """Measure the method as a checkpoint is measured during training, write metrics.jsonl and return the metric."""
    part, metric = selecting_part(start.config, split), start.config.evaluate.metric
    began = time.perf_counter()
    result = task.evaluate({}, start.store, split, part, should_stop=lambda: bool(stop))
    assert metric is not None, "resolve the config first"
    record = {
        "kind": "eval",
        "step": 0,
        "part": part,
        "epoch": 0.0,
        **result.metrics,
        "num_users": result.num_users,
        "elapsed": progress.wall_seconds,
        "evaluation_seconds": time.perf_counter() - began,
    }
    replace_text(start.run / "metrics.jsonl", json.dumps(record, allow_nan=False) + "\n")
    print(f"{part}  {metric} {result.metrics[metric]:.4f}", file=sys.stderr, flush=True)
    return result.metrics[metric]
