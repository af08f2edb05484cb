"""summary.json, written when a run ends: metrics of the best checkpoint, baselines, time, throughput and memory."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from turbogr.config import Config
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.device_measurement import peak_memory as peak_memory_on
from turbogr.evaluation.progress_lines import ProgressLines
from turbogr.evaluation.sample_users import write_samples
from turbogr.evaluation.user_positions import Measured, UserPositions
from turbogr.files import replace_text
from turbogr.parallel.world import World
from turbogr.progress import Progress
from turbogr.runs import MetricLog, RunFolder, TrainedModel, load_model
from turbogr.tasks import task_class
from turbogr.tasks.task import Measurement
from turbogr.training.checkpoint_selection import describe_checkpoint, selected_on

SUMMARY = "summary.json"


def write_summary(
    run: Path,
    config: Config,
    store: Store,
    split: Split,
    progress: Progress,
    *,
    status: str,
    peak_flops: float | None,
    should_stop: Callable[[], bool],
    world: World | None = None,
    trained: TrainedModel | None = None,
    device: torch.device | None = None,
) -> None:
    """Measure the best checkpoint of a run on the test items, beside the baselines, and write summary.json.

    `device` is where it computes, by default the CPU.
    `trained` is what is measured if it is not the best checkpoint of the run folder, such as a fitted simple method.
    The positions of all users go to a file of their own, and some users' recommendations to samples.json.

    With a `world` of many ranks all call it together; rank 0 measures the baselines and writes, and `peak_memory_bytes`
    is that of all ranks together; `peak_device_memory_bytes` is that of the fullest accelerator.

    Throughput and utilisation are means over all training steps, without evaluations and checkpoints; `wall_seconds`
    has all. MFU is None where no peak was measured. Cut-offs 10, 50 and 200 are always measured. `protocol.seen` says
    whether items that a user has had before were candidates for `metrics`; the metrics of both ways stand beside them.
    `metrics` are those of what the run recommends with, which `delivered` names; `model_metrics` are the model's own.
    `baselines_refused` says why a baseline is not among `baselines`. `skipped_steps` taught nothing: a value was not
    finite. `stragglers` says since which step which ranks were slow.

    Raises:
        Interrupted: `should_stop` returned True; nothing is written.
    """
    world = world or World()
    trained = trained or world.run_on_all(lambda: load_model(run, device=device or "cpu"))
    started = time.perf_counter()
    part = "test" if (split.test >= 0).any() else "valid"
    total = trained.task.num_measured(split, part, world.size)
    lines = ProgressLines(f"measuring the {part} items", total, shown=world.is_first)
    result = trained.task.evaluate(
        trained.tables,
        store,
        split,
        part,
        final=True,
        progress=lines.advance,
        should_stop=lines.watching(should_stop),
        world=world,
    )
    peak_memory = sum(world.gather_objects(peak_memory_bytes()))
    on_device = world.gather_objects(None if device is None else peak_memory_on(device))
    if not world.is_first:
        return
    should_stop = ProgressLines("measuring the baselines and what to deliver").watching(should_stop)
    baselines = trained.task.measure_baselines(store, split, part, final=True, should_stop=should_stop)
    model = Measured.of(result)
    chosen = trained.task.deliver(trained.tables, store, split, should_stop=should_stop)
    better = trained.task.evaluate_delivered(trained.tables, store, split, part, final=True, should_stop=should_stop)
    delivered = model if better is None else Measured.of(better)
    coverage = trained.task.coverage(trained.tables, store, split, part, should_stop=should_stop)
    summary = {
        "status": status,
        "task": config.task,
        "part": part,
        "metrics": delivered.metrics,
        "delivered": None if chosen is None else chosen.label,
        "model_metrics": model.metrics,
        "model_standard_errors": model.standard_errors,
        **_both_ways(delivered, baselines),
        "standard_errors": delivered.standard_errors,
        "baselines": {name: system.metrics for name, system in baselines.items()},
        "baseline_standard_errors": {name: system.standard_errors for name, system in baselines.items()},
        "baselines_refused": trained.task.refused_baselines(store, split),
        "coverage": None if coverage is None else dataclasses.asdict(coverage),
        **_details(delivered, baselines),
        "num_users": result.num_users,
        "protocol": {
            **_seen(config, trained.folder),
            "text": f"{result.protocol}; {describe_checkpoint(config, split, trained.checkpoint, part)}",
        },
        "selected_on": selected_on(config, split, trained.checkpoint),
        "step": trained.checkpoint.step,
        "steps": progress.step,
        "epochs": progress.epochs,
        "skipped_steps": progress.skipped_steps,
        "stragglers": [_without_kind(record) for record in MetricLog.read(run).stragglers],
        **({} if config.method else _speed(progress, peak_flops)),
        "peak_memory_bytes": peak_memory,
        **({} if None in on_device else {"peak_device_memory_bytes": max(filter(None, on_device), default=0)}),
        "wall_seconds": progress.wall_seconds + time.perf_counter() - started,
        "state": _state(config, progress),
    }
    systems = {**_systems(model, better), **baselines}
    by_user = UserPositions.of(store, split, part, trained.checkpoint.step, systems, trained.task.sample())
    if by_user is not None:
        by_user.write(run)
    samples = trained.task.samples(trained.tables, store, split, part)
    if samples is not None:
        write_samples(run / "samples.json", {"step": trained.checkpoint.step, **samples})
    if chosen is not None:
        chosen.write(run)
    replace_text(run / SUMMARY, json.dumps(summary, indent=2) + "\n")


def _without_kind(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "kind"}


def _speed(progress: Progress, peak_flops: float | None) -> dict[str, Any]:
    seconds = max(progress.seconds, 1e-9)
    return {
        "tokens": progress.tokens,
        "tokens_per_second": progress.tokens / seconds,
        "mfu_strict": None if peak_flops is None else progress.strict_flops / seconds / peak_flops,
        "mfu_nominal": None if peak_flops is None else progress.nominal_flops / seconds / peak_flops,
    }


def _systems(model: Measured, better: Measurement | None) -> dict[str, Measured]:
    """The model, and what is delivered where that is something else."""
    return {"model": model} if better is None else {"delivered": Measured.of(better), "model": model}


def _both_ways(model: Measured, baselines: Mapping[str, Measured]) -> dict[str, Any]:
    """The metrics of model and baselines without and with seen items; nothing of tasks that have no such."""
    if model.metrics_exclude_seen is None or model.metrics_include_seen is None:
        return {}
    return {
        "metrics_exclude_seen": model.metrics_exclude_seen,
        "metrics_include_seen": model.metrics_include_seen,
        "baselines_exclude_seen": {name: system.metrics_exclude_seen for name, system in baselines.items()},
        "baselines_include_seen": {name: system.metrics_include_seen for name, system in baselines.items()},
    }


def _details(model: Measured, baselines: Mapping[str, Measured]) -> dict[str, Any]:
    """What a task that predicts actions has to show of them, by system and by what it predicts."""
    found = {"model": model.details, **{name: system.details for name, system in baselines.items()}}
    kept = {name: details for name, details in found.items() if details}
    return {"details": kept} if kept else {}


def _seen(config: Config, folder: RunFolder) -> dict[str, Any]:
    """What was done with items that users have had before, and what chose it, as run.json has it."""
    if not task_class(config.task).predicts_items:
        return {}
    stored = folder.record.get("protocol")
    return {**(stored or {}), "seen": "excluded" if config.evaluate.excludes_seen else "included"}


def summary_is_current(run: Path, config: Config, progress: Progress) -> bool:
    """Whether summary.json tells of this very state of the run."""
    summary = read_summary(run)
    return summary is not None and bool(summary["state"] == _state(config, progress))


def read_summary(run: Path) -> dict[str, Any] | None:
    """Return summary.json, or None if it is missing, damaged or measured by another rule; resuming writes it again."""
    summary = _read(run)
    return None if summary is None or _by_another_rule(summary) else summary


def is_outdated(run: Path) -> bool:
    """Whether the figures of summary.json are by another rule than today's, so that they cannot be compared."""
    summary = _read(run)
    return summary is not None and _by_another_rule(summary)


def _read(run: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        complete = {"part", "metrics", "protocol", "step", "state"} <= summary.keys()
    except (OSError, ValueError, AttributeError):
        return None
    return dict(summary) if complete else None


def _by_another_rule(summary: dict[str, Any]) -> bool:
    return not task_class(summary.get("task", "retrieval")).is_comparable(summary["state"])


def _state(config: Config, progress: Progress) -> dict[str, Any]:
    """What a summary depends on."""
    return {
        "steps": progress.step,
        "best_step": progress.best_step,
        **({"skipped_steps": progress.skipped_steps} if progress.skipped_steps else {}),
        **_deliver_state(config),
        **task_class(config.task).rule(config.evaluate, final=True),
    }


def _deliver_state(config: Config) -> dict[str, Any]:
    """What is delivered is measured, so a summary depends on how it is chosen; 0.1.0 had no choice."""
    baselines = config.evaluate.baselines
    found = {"deliver": config.deliver.choose, "baselines": None if baselines is None else list(baselines)}
    return {name: value for name, value in found.items() if value not in ("model", None)}


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
