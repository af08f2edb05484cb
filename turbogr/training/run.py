"""A run from recipe to run folder: resolve the config against the data, set the folder up, train, keep the record."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbogr import machine, ops
from turbogr.accelerators import choose_device
from turbogr.config import (
    Config,
    Overrides,
    flat_config,
    ignored_settings,
    load_config,
    resolve,
    resolve_method,
    with_options,
    with_overrides,
    with_plugins,
)
from turbogr.config.from_data import LONGEST_WINDOW
from turbogr.data.repeats import Repeats, count_repeats
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.device_measurement import Precision, device_gemm_peak, set_product_precision
from turbogr.errors import Note, UserError, warn_caller
from turbogr.evaluation.evaluator import Interrupted
from turbogr.ops import bf16_unit, projections
from turbogr.ops.norm_linear.cpu import SMALL_WEIGHT
from turbogr.parallel.consistency import (
    check_same_start,
    check_shared_folder,
    use_same_bf16_unit,
    use_same_kernels,
    use_same_products,
)
from turbogr.parallel.job_identity import Job
from turbogr.parallel.mesh import Mesh, MeshSize, choose_mesh
from turbogr.parallel.world import World, connected_world, is_first_rank, set_heartbeat_timeout
from turbogr.peak import Peak, measure_peak, peak_facts
from turbogr.plugins import find as component_of
from turbogr.plugins import operators_of
from turbogr.plugins import record as component_records
from turbogr.runs import RunFolder
from turbogr.simple.popularity_strength import popularity_strength
from turbogr.tables.embedding_tables import EmbeddingTables
from turbogr.tasks import task_class
from turbogr.tasks.task import Task
from turbogr.training.checkpoint_selection import check_selection
from turbogr.training.cost_measurement import with_measured_cost
from turbogr.training.method_run import fit_method
from turbogr.training.resuming import (
    changed_settings,
    check_own_run,
    holds_a_run,
    refusals,
    with_stored_choices,
    with_stored_measurements,
    with_stored_sizes,
)
from turbogr.training.run_start import RunStart, held_folder, keep_data, now
from turbogr.training.run_summary import SUMMARY, summary_is_current, write_summary
from turbogr.training.stopping import AgreedStop
from turbogr.training.trainer import Trainer, TrainResult
from turbogr.training.warm_start import WarmStart, repeated_warm_start


def train(
    recipe: str | Path | Config,
    data: str | Path,
    out: str | Path,
    *,
    overrides: Overrides = (),
    resume: bool = False,
    init_from: str | Path | None = None,
    plugins: Sequence[str | Path] = (),
    until_epoch: int | None = None,
) -> TrainResult:
    """Train a recipe on the prepared store `data` into the run folder `out`; `turbogr.train` is the general form.

    `overrides` replace settings of the recipe, see `load_config`.
    With `resume`, an existing run continues from its newest checkpoint with the same model and data; how long (but
    not less than it has been trained), how fast, on how many ranks and how it is evaluated may change. A folder
    that does not exist yet is started. `init_from` is a run whose parameters and item vectors a new run starts
    from; `data` must extend what that run was trained on. A run that is resumed before its first checkpoint starts
    from it again. With `until_epoch` training pauses after that epoch, without a summary; it is "interrupted"
    without a signal, and resumes to the same weights. `plugins` are files or modules of your own components,
    besides those that the recipe names.

    A process that torchrun has started trains together with the other ranks; `data` and `out` must be the same folders
    for all of them. Rank 0 prints and writes. When torchrun restarts the ranks, they resume the run that their own job
    has started; the run of another job needs `resume`.

    Raises:
        UserError: a bad recipe, store or folder; NonFiniteError when training diverges.
    """
    with connected_world() as world, world.reporting_errors_once():
        start = world.run_on_all(lambda: _prepare(recipe, data, out, overrides, resume, init_from, plugins, world.job))
        check_same_start(
            world,
            {
                **flat_config(start.config),
                "the data (content hash)": start.store.manifest.content_hash,
                "--out": str(start.run.absolute()),
                "what --out holds": f"a run of {start.record['created']}" if start.exists else "no run",
                "--init-from": start.record["init_from"],
                "the weights to start from": None if start.warm_start is None else start.warm_start.identity,
                "the plug-ins": start.record["components"],
            },
        )
        set_heartbeat_timeout(start.config.parallel.timeout)
        if start.config.method is not None:
            return fit_method(start, world)
        trainer, environment = _build(start, world)
        if start.warm_start is not None:
            start.warm_start.apply(trainer.model, trainer.tables)
        start.record["model"] = {
            "name": trainer.task.model_name(start.config),
            "title": _model_title(trainer.task, start.config),
            "num_dense_parameters": trainer.task.num_parameters,
            "num_table_parameters": trainer.tables.num_parameters,
        }
        with held_folder(start, environment, world) as keep_status:
            check_shared_folder(world, start.run)
            if start.exists:
                trainer.resume()
            if world.is_first:
                about_repeats = start.record.get("protocol", {}).get("reason")
                _say_what_starts(trainer, start.changes, environment["ranks"]["why"], about_repeats)
            trainer.until_epoch = until_epoch
            result = _train_and_summarise(trainer)
            if world.is_first and result.status != "interrupted":
                keep_data(start)
            keep_status(result.status)
    return result


def _prepare(
    recipe: str | Path | Config,
    data: str | Path,
    out: str | Path,
    overrides: Overrides,
    resume: bool,
    init_from: str | Path | None,
    plugins: Sequence[str | Path],
    job: Job,
) -> RunStart:
    """Read and check all that a run begins with; nothing is written."""
    if isinstance(recipe, Config):
        config = with_overrides(with_plugins(recipe, plugins), overrides)
    else:
        config = load_config(recipe, overrides, plugins=plugins)
    store, run = Store.open(data), Path(out)
    exists = holds_a_run(run)
    if exists and not resume:
        check_own_run(run, job)
    if config.train.gemm != "auto":
        projections.parse_choice(config.train.gemm)
    if config.method is not None:
        _check_method(config, init_from)
    if exists:
        warm_start = repeated_warm_start(run, store, init_from)
        config = with_stored_sizes(config, run)
    else:
        warm_start = None if init_from is None else WarmStart(init_from, store)
    given = with_stored_choices(config if warm_start is None else warm_start.fill(config), run)
    repeats = count_repeats(store, Split.of(store, config.data.split))
    config = resolve_against(given, store, repeats)
    changes: list[str] = []
    if exists:
        config = with_stored_measurements(config, run)
    record = _resumed_record(run, config, store, changes) if exists else _new_record(config, store, recipe)
    record["components"] = component_records(dict.fromkeys([*config.chosen(), *operators_of(config.plugins)]))
    task = task_class(config.task)
    record["metrics"] = [asdict(info) for info in task.describe_metrics(task.metric_names(config, final=True))]
    if task_class(config.task).predicts_items and repeats is not None:
        record["protocol"] = _protocol(given, config, repeats, record.get("protocol"))
    record.setdefault("init_from", None if init_from is None else str(Path(init_from).resolve()))
    if warm_start is not None:
        record["init_from_checkpoint"] = warm_start.identity
    record["job"] = job.to_record()
    return RunStart(config, store, run, exists, warm_start, record, changes)


def _check_method(config: Config, init_from: str | Path | None) -> None:
    """Raise UserError or print a note for what was asked for and has no meaning for a simple method."""
    if init_from is not None:
        raise UserError(
            f"model.name is '{config.method}', which has no parameters that another run could give it; leave out "
            "--init-from"
        )
    ignored = ignored_settings(config)
    if ignored and is_first_rank():
        warn_caller(
            f"{config.method} is fitted in one go and has no network; settings that mean nothing for it are ignored: "
            f"{', '.join(ignored)}",
            Note,
        )


def _build(start: RunStart, world: World) -> tuple[Trainer, dict[str, Any]]:
    """Set this process up and make the trainer; return it with the content of environment.json."""
    config = start.config
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    ops.set_backend(config.train.backend)
    ops.keep_freed_memory()
    device = choose_device(config.train.device, world.local_rank if world.size > 1 else None)
    set_product_precision(config.train.precision, device)
    use_same_kernels(world, device)
    config = start.config = _with_products(start, world, device)
    unit = _choose_bf16_unit(start, world, device)
    config = start.config = _with_cost(config, start.store, world, device)
    mesh_size = _mesh_size(config, start.store, world, device)
    mesh = Mesh.build(world, mesh_size, device.type)
    peak = Peak.of_all(world.gather_objects(_peak_of(device, config.train.precision)))
    trainer = Trainer(
        config, start.store, start.run, device=device, peak_flops=None if peak is None else peak.flops, mesh=mesh
    )
    environment = {
        "versions": machine.versions(),
        "machine": {
            **machine.machine_facts(),
            "device": str(device),
            **peak_facts(peak),
            "bf16_unit": unit,
            "peak_precision": "fp32" if device.type == "cpu" else config.train.precision,
        },
        "backends": {service.operator: service.backend for service in ops.services(device)},
        "ranks": {
            "size": world.size,
            "per_machine": world.local_size,
            "groups": mesh.groups,
            "members": mesh.members,
            "why": mesh_size.reason,
            "row_precision": config.parallel.row_precision,
            "balance": trainer.loader.balance if world.size > 1 else None,
        },
    }
    return trainer, environment


def _with_products(start: RunStart, world: World, device: torch.device) -> Config:
    """Choose who computes large products, where the model has some, and fill the choice in.

    A run that was started without a choice, because its model is small or it is older, goes on with PyTorch's library.
    """
    config, text = start.config, start.config.train.gemm
    dim = config.model.dim or 0
    without = device.type != "cpu" or config.train.backend == "reference" or 8 * dim**2 <= SMALL_WEIGHT
    if text == "auto" and (without or start.exists):
        projections.use(projections.uniform("torch"))
        return config
    chosen = use_same_products(world, text)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, gemm=chosen))


def _choose_bf16_unit(start: RunStart, world: World, device: torch.device) -> str | None:
    """Choose what multiplies bf16 on all ranks, None where that does not arise; a run that goes on keeps what it had.

    Runs of before such units were used computed these products in fp32.
    """
    train = start.config.train
    if train.precision != "bf16" or device.type != "cpu" or train.backend == "reference":
        return None
    found: list[str | None] = [None]

    def look() -> None:
        path = start.run / "environment.json"
        if start.exists and path.exists():
            environment = json.loads(path.read_text(encoding="utf-8"))
            found.append(environment.get("machine", {}).get("bf16_unit", "none"))

    world.run_on_first(look)
    return use_same_bf16_unit(world, world.gather_objects(found[-1])[0])


def _peak_of(device: torch.device, precision: Precision) -> Peak:
    """Return what a device computes at most; of an accelerator, its library's best product in the run's precision."""
    return measure_peak() if device.type == "cpu" else Peak(None, device_gemm_peak(device, precision))


def _with_cost(config: Config, store: Store, world: World, device: torch.device) -> Config:
    """Fill in what sequences cost, if ranks share them by cost: rank 0 measures, so that all plan with its numbers."""
    if world.size == 1 or config.parallel.balance in ("none", "token-budget"):
        return config
    measured = [config]
    world.run_on_first(lambda: measured.append(with_measured_cost(config, store.num_items, device=device)))
    return world.gather_objects(measured[-1])[0]


def _mesh_size(config: Config, store: Store, world: World, device: torch.device) -> MeshSize:
    specs = task_class(config.task).table_specs(config, store.num_items)
    memory = machine.memory_bytes() // world.local_size if device.type == "cpu" else machine.device_memory(device)
    return choose_mesh(
        world.size,
        math.gcd(*world.gather_objects(world.local_size)),  # machines may have unequal numbers of ranks
        groups=config.parallel.groups if world.size > 1 else None,
        members=config.parallel.members if world.size > 1 else None,
        table_bytes=sum(spec.num_bytes for spec in specs),
        rank_memory=min(world.gather_objects(memory)),
    )


def _train_and_summarise(trainer: Trainer) -> TrainResult:
    """Train, and write the summary of a run that came to its end unless that of the same state is there already."""
    world = trainer.world

    def is_current() -> bool:
        return world.gather_objects(summary_is_current(trainer.run, trainer.config, trainer.progress))[0]

    if not is_current() and world.is_first:
        (trainer.run / SUMMARY).unlink(missing_ok=True)
    result = trainer.fit()
    if trainer.until_epoch is not None:
        return dataclasses.replace(result, status="interrupted")
    if result.status == "interrupted" or is_current():
        return result
    with AgreedStop(world) as stop:
        try:
            write_summary(
                trainer.run,
                trainer.config,
                trainer.store,
                trainer.split,
                trainer.progress,
                status=result.status,
                peak_flops=trainer.peak_flops,
                should_stop=stop.is_requested,
                world=world,
                device=trainer.device,
            )
        except Interrupted:
            return dataclasses.replace(result, status="interrupted", signal=stop.own_signal or int(signal.SIGTERM))
    return result


def _protocol(given: Config, resolved: Config, repeats: Repeats, stored: Any) -> dict[str, Any]:
    """Return what is done with seen items and why, for run.json; what is `stored` there stays until it changes."""
    filter_seen = given.evaluate.filter_seen
    seen = "excluded" if resolved.evaluate.excludes_seen else "included"
    if isinstance(stored, dict) and stored.get("seen") == seen:
        return stored
    return {
        "seen": seen,
        "chosen_by": "the log" if filter_seen is None else "evaluate.filter_seen",
        "reason": repeats.conclude(filter_seen),
        "repeats": asdict(repeats),
    }


def resolve_against(config: Config, store: Store, repeats: Repeats | None = None) -> Config:
    """Fill in what a config leaves to the data of a store, and check that it can be trained on it.

    `repeats` are those of `count_repeats`, where they have been counted already.

    Raises:
        UserError: a split that the store does not allow or that holds nothing out to choose a checkpoint by, or
            features that the store does not have.
    """
    split = Split.of(store, config.data.split)
    check_selection(config, split, store)
    if repeats is None and config.evaluate.filter_seen is None:
        repeats = count_repeats(store, split)
    filter_seen = True if repeats is None else repeats.filter_seen
    if config.method is not None:
        return resolve_method(config, filter_seen=filter_seen)
    task = task_class(config.task)
    inputs = split.train_end - np.asarray(store.offsets[:-1]) - (not task.predicts_actions)
    num_sequences = int((inputs > 0).sum())
    inputs = np.maximum(inputs, 1)
    return resolve(
        task.resolve(with_options(config), store, split),
        num_items=store.num_items,
        num_sequences=num_sequences,
        typical_length=int(np.quantile(inputs, 0.9)),
        longest_length=int(inputs.max()),
        num_events=int(inputs.sum()),
        covering_length=_covering_length(inputs),
        popularity_strength=_popularity_strength(config, store, split, seen_out=filter_seen),
        reachable_events=int(np.minimum(inputs, LONGEST_WINDOW).sum()),
        filter_seen=filter_seen,
    )


def _covering_length(lengths: Int64Array, share: float = 0.95) -> int:
    """Return the least number of newest events of every user that hold `share` of all events."""
    counts = np.bincount(lengths)
    longer = counts[::-1].cumsum()[::-1][1:]  # [n - 1]: users with n events or more
    covered = longer.cumsum()
    return int(np.searchsorted(covered, share * covered[-1])) + 1


def _popularity_strength(config: Config, store: Store, split: Split, *, seen_out: bool) -> float | None:
    """Measure it where a setting depends on it."""
    needed = config.defaults == "from-data" and "loss.temperature" not in config.given
    if not needed or not component_of("task", config.task).factory.predicts_items:
        return None
    return popularity_strength(store, split, seen_out=config.evaluate.filter_seen is not False and seen_out)


def _new_record(config: Config, store: Store, recipe: str | Path | Config) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "turbogr": machine.versions()["turbogr"],
        "command": shlex.join(["turbogr", *sys.argv[1:]]) if _is_command_line() else None,
        "recipe": None if isinstance(recipe, Config) else str(recipe),
        "created": now(),
        "finished": None,
        "status": "running",
        "data": {
            "path": str(store.path.resolve()),
            "content_hash": manifest.content_hash,
            "source": manifest.source,
            "num_users": manifest.num_users,
            "num_items": manifest.num_items,
            "items_fingerprint": store.item_ids.fingerprint(manifest.num_items),
            "num_events": manifest.num_events,
        },
    }


def _is_command_line() -> bool:
    """Whether this process is `turbogr ...` or `python -m turbogr ...`, not somebody's program."""
    program = Path(sys.argv[0])
    return program.stem == "turbogr" or (program.name == "__main__.py" and program.parent.name == "turbogr")


def _resumed_record(run: Path, config: Config, store: Store, changes: list[str]) -> dict[str, Any]:
    """Return the record of a run that may be continued with this config and store, else raise UserError.

    What has changed and may is added to `changes`, a line each.
    """
    for refusal in refusals(run, config, store):
        raise UserError(f"{run} was {refusal.reason}; {refusal.remedy}")
    changed = changed_settings(run, config)
    changes += [f"resuming with {key}={after} (was {before})" for key, (before, after) in changed.items()]
    record = RunFolder.open(run).record
    return {**record, "data": {**record["data"], "path": str(store.path.resolve())}}


def _say_what_starts(trainer: Trainer, changes: list[str], why_mesh: str, about_repeats: str | None = None) -> None:
    loader, store = trainer.loader, trainer.store
    if trainer.config.train.precision == "tf32" and trainer.device.type == "cpu":
        warn_caller("train.precision=tf32 is for accelerators; on a CPU products are in fp32, which is as exact", Note)
    if trainer.config.train.precision == "bf16" and trainer.device.type == "cpu":
        unit = bf16_unit.in_use()
        how = "computes products in fp32, so training is not faster: no unit for bf16 works here (turbogr doctor)"
        if unit != "none":
            how = f"multiplies projections in bf16 by {unit}"
        warn_caller(f"train.precision=bf16 stores activations in bf16, in half the memory, and {how}", Note)
    lines = [
        *changes,
        f"{_describe_model(trainer.task, trainer.config)}{trainer.task.num_parameters:,} dense parameters, "
        f"{_describe_tables(trainer.tables)}",
        f"{loader.num_sequences:,} sequences, {loader.num_tokens:,} tokens an epoch, "
        f"{loader.num_batches(0):,} batches; {store.num_items:,} items; split {trainer.split.rule}",
    ]
    if about_repeats is not None:
        lines.append(about_repeats)
    if loader.num_targets_skipped:
        share = loader.num_targets_skipped / (loader.num_targets_skipped + loader.num_targets)
        lines.append(
            f"{loader.num_targets_skipped:,} training targets ({share:.1%}) are items that the user has had before and "
            "are not trained on; data.repeated_targets=train trains on all"
        )
    few = None if trainer.task.predicts_actions else trainer.split.few_users()
    if few is not None:
        lines.append(few)
    if trainer.world.size > 1:
        lines.append(f"{trainer.world.size} ranks, {trainer.mesh} (groups × members): {why_mesh}")
    if loader.num_events_cut:
        share = loader.num_events_cut / (loader.num_events_cut + loader.num_tokens)
        lines.append(
            f"{loader.num_events_cut:,} training events ({share:.1%}) lie further back than model.max_len and are not "
            "used; data.window=split uses them all"
        )
    if trainer.progress.step:
        lines.append(f"resuming after step {trainer.progress.step}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _model_title(task: Task, config: Config) -> str:
    return component_of("block", config.model.name).title if task.has_blocks else task.name


def _describe_model(task: Task, config: Config) -> str:
    """The start of a line that goes on with the model's parameters."""
    model = config.model
    sizes = f"{model.num_blocks} blocks of width {model.dim}, up to {model.max_len} events; " if task.has_blocks else ""
    return f"{task.model_name(config)}: {sizes}"


def _describe_tables(tables: EmbeddingTables) -> str:
    sizes = [f"{spec.num_rows * spec.dim:,} in the {spec.name} table" for spec in tables.specs]
    return ", ".join(sizes)
