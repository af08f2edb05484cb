"""Whether a run can be resumed with a config and a store: what may change, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr.checkpoints import Checkpoints
from turbogr.config import Config, flat_config, load_run_config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.parallel.job_identity import Job
from turbogr.progress import NewerCheckpoint, Progress
from turbogr.runs import RunFolder
from turbogr.simple.method_settings import fixed_settings, with_settings
from turbogr.training.warm_start import with_sizes_of

_MAY_CHANGE = ("plugins", "train", "evaluate", "deliver", "optimizer", "parallel", "pipeline")
LOCK_FILE = ".lock"  # in a run folder, where the file system cannot lock the folder itself
_FIXED = ("train.seed", "optimizer.table")


@dataclass(frozen=True)
class Refusal:
    """Why a run cannot be continued, as the end of a sentence that begins with "it was", and what to do instead."""

    reason: str
    remedy: str


def holds_a_run(run: Path) -> bool:
    """Whether there is something to resume or to protect; what a killed start left before run.json does not count."""
    if not run.is_dir():
        return os.path.lexists(run)
    left_behind = {"config.yaml", "environment.json", LOCK_FILE}
    return any(entry.name not in left_behind and not entry.name.endswith(".part") for entry in run.iterdir())


def check_own_run(run: Path, job: Job) -> None:
    """Check that what `run` holds may be resumed without being asked for: the same job has started it.

    Raises:
        UserError: it is somebody else's.
    """
    record = RunFolder.open(run).record if (run / "run.json").exists() else {}
    if job.is_restart_of(record.get("job")):
        return
    other = " and was not started by this job" if job.agents and "status" in record else ""
    raise UserError(f"{run} already exists{other}; choose another --out, continue it with --resume, or remove it")


def refusals(run: Path, config: Config, store: Store, *, fixed: Collection[str] = ()) -> list[Refusal]:
    """Return why `train` would not resume a run with this config and store; no run, no refusal.

    `fixed` are settings, `section.key`, that may not change either, though `train` would let them.

    Raises:
        UserError: something stands there that is no run, or a run that cannot be read.
    """
    if not holds_a_run(run):
        return []
    if not (run / "run.json").exists():
        raise UserError(
            f"{run} is not a run folder (it has no run.json), and a run would go there; choose another --out, or move "
            "away what is there"
        )
    found = []
    trained_on = RunFolder.open(run).record["data"]
    if trained_on["content_hash"] != store.manifest.content_hash:
        reason = f"trained on {trained_on['path']}, and {store.path} holds other data"
        found.append(Refusal(reason, "resume with the same store, or start a new run"))
    shortened = _shortened(run, config)
    for key, (before, after) in changed_settings(run, config).items():
        section = key.split(".")[0]
        reason = f"started with {key}={before}, not {after}"
        if section not in _MAY_CHANGE or key in _FIXED:
            what = "it cannot be resumed with another model, loss or data. "
            found.append(Refusal(reason, f"{what}Give the same value, or start a new run"))
        elif (key in fixed or section in fixed) and key not in shortened:
            found.append(Refusal(reason, "give the same value, or start a new run"))
    return [*found, *shortened.values()]


def changed_settings(run: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those a run was trained with last, as (before, after)."""
    before, after = (flat_config(c) for c in (load_run_config(run), with_stored_measurements(config, run)))
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def _shortened(run: Path, config: Config) -> dict[str, Refusal]:
    """Refusals by setting where a config asks for less than was trained: no run can go back to where it matches."""
    progress = _newest_progress(run)
    position = progress.loader
    trained = {
        "epochs": (position["epoch"] + (position["step"] > 0), f"{progress.epochs:.4g}"),
        "steps": (progress.step, f"{progress.step}"),
    }
    found = {}
    for name, (least, shown) in trained.items():
        key, limit = f"train.{name}", getattr(config.train, name)
        if limit is not None and limit < least:
            reason = f"trained for {shown} {name} already, and {key} is {limit}"
            found[key] = Refusal(reason, f"set it to {least} or more, or start a new run")
    return found


def _newest_progress(run: Path) -> Progress:
    """Return how far a run has come; `Trainer.resume` reports a damaged checkpoint.

    Raises:
        NewerCheckpoint: a later release wrote it.
    """
    checkpoints = Checkpoints(run)
    for step in reversed(checkpoints.steps()):
        try:
            return checkpoints.progress(step)
        except NewerCheckpoint:
            raise
        except UserError:
            continue
    return Progress()


def with_stored_choices(config: Config, run: Path) -> Config:
    """Keep what an existing run does with seen items and repeated targets, and the settings that were chosen for its
    simple method, where the config leaves them open."""
    evaluate, data = config.evaluate, config.data
    if config.method is None and None not in (evaluate.filter_seen, data.repeated_targets):
        return config
    if not (holds_a_run(run) and (run / "config.yaml").exists()):
        return config
    stored = load_run_config(run)
    if evaluate.filter_seen is None:
        evaluate = dataclasses.replace(evaluate, filter_seen=stored.evaluate.filter_seen)
    if data.repeated_targets is None:
        data = dataclasses.replace(data, repeated_targets=stored.data.repeated_targets)
    options = config.options
    if config.method is not None and stored.method == config.method:
        chosen = fixed_settings(config.method, stored.options)
        options = with_settings(config.method, options, {**chosen, **fixed_settings(config.method, options)})
    return dataclasses.replace(config, evaluate=evaluate, data=data, options=options)


def with_stored_sizes(config: Config, run: Path) -> Config:
    """Keep the model sizes that an existing run took over from another one, where the config leaves them open."""
    if not (run / "run.json").exists() or RunFolder.open(run).record.get("init_from") is None:
        return config
    return with_sizes_of(config, load_run_config(run))


def with_stored_measurements(config: Config, run: Path) -> Config:
    """Keep what was measured when a run was started, the cost of sequences and the providers of products, where the
    config leaves it open: the same plan and the same providers give the same rounding."""
    if not (run / "config.yaml").exists():
        return config
    stored = load_run_config(run)
    if config.parallel.cost is None:
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cost=stored.parallel.cost))
    if config.train.gemm == "auto":
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, gemm=stored.train.gemm))
    return config
