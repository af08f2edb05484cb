"""What runs early changes nothing (sync, exact_overlap) or exactly what the definition says (semi_async)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.conftest import write_store
from tests.training.test_run import assert_same_end, final_tensors, metrics, stop_after
from turbogr import cli
from turbogr.checkpoints import Checkpoints
from turbogr.config import Config, PipelineConfig, dump_config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.streams import tensors_of
from turbogr.training import timeline
from turbogr.training.dense_optimizer import lr_factor
from turbogr.training.pipeline import ExactOverlap, Pipelined, SemiAsync, Serial, make_executor
from turbogr.training.pipeline.executor import PendingBatch
from turbogr.training.pipeline.pipelined import ReadsAhead
from turbogr.training.pipeline.row_parts import RowParts
from turbogr.training.pipeline.semi_async import StalenessError
from turbogr.training.pipeline.workers import Inline, Job, StageFailed, Threaded
from turbogr.training.run import resolve_against, train
from turbogr.training.step import Stepper
from turbogr.training.timeline import Timeline
from turbogr.training.trainer import Trainer

STAGES = {"load": "_load", "exchange": "_exchange", "wait": "_wait", "embed": "_read"}
BESIDE = ("_update_rows", "_update_rest", "_sum_early", "_catch_up")
MODES: dict[str, dict[str, Any]] = {
    "serial": {"depth": 1},
    "sync": {"depth": 4},
    "semi_async": {"mode": "semi_async"},
    "exact_overlap": {"mode": "exact_overlap"},
}


@pytest.fixture(params=["adam", "adagrad clipped"])
def sparse_config(config: Config, request: pytest.FixtureRequest) -> Config:
    return sparse(config, request.param)


def sparse(config: Config, optimizer: str = "adam") -> Config:
    """Small batches, so that consecutive ones share some rows but not all."""
    table, _, clipped = optimizer.partition(" ")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_len=4),
        loss=dataclasses.replace(config.loss, num_negatives=1),
        optimizer=dataclasses.replace(config.optimizer, table=table, clip_norm=2.0 if clipped else None),
        data=dataclasses.replace(config.data, batch_size=3),
        train=dataclasses.replace(config.train, epochs=2),
    )


def with_pipeline(config: Config, **options: Any) -> Config:
    return dataclasses.replace(config, pipeline=PipelineConfig(**options))


def trainer_of(config: Config, store: Store, run: Path, make_worker: Callable[..., Any] = Threaded) -> Trainer:
    trainer = Trainer(resolve_against(config, store), store, run, device=torch.device("cpu"), peak_flops=None)
    trainer.executor = make_executor(trainer.stepper, config.pipeline, trainer.timeline, make_worker)
    return trainer


def train_epochs(trainer: Trainer, epochs: int = 2) -> list[PendingBatch]:
    """Train without evaluations or checkpoints; return what has trained."""
    trained = []
    for _ in range(epochs):
        with trainer.batches() as batches:
            for pending in batches:
                trainer.step(pending)
                trained.append(pending)
    trainer.executor.finish_updates()
    return trained


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for part in tree.values() for leaf in _leaves(part)] if isinstance(tree, dict) else [tree]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    state = trainer.stepper.state()
    tensors = [*state["model"].values(), *_leaves(state["tables"])]
    return [tensor.detach().clone() for tensor in tensors]


def train_by_definition(trainer: Trainer, staleness: int, epochs: int = 2, left_out: Collection[int] = ()) -> None:
    """Keep every state of the table; batch t reads the one before the updates of the `staleness` batches before it.

    The updates of the steps `left_out`, from 0, are not made.
    """
    stepper, tables = trainer.stepper, trainer.tables
    step = 0
    for epoch in range(epochs):
        states = []
        for number in range(trainer.loader.num_batches(epoch)):
            states.append([weight.clone() for weight in tables.weights])
            batch = stepper.prepare(trainer.loader.batch(epoch, number), step)
            read = states[max(0, number - staleness)]
            request = tables.receive_ids(tables.send_ids(stepper.ids(batch)))
            working_sets = tables.working_sets(request, tables.fetch_rows(request.requests, read))
            loss = stepper.compute(batch, working_sets, step)
            rows = stepper.reduce(working_sets)
            norm = stepper.measure(loss, rows).grad_norm
            if step not in left_out:
                stepper.update(rows, norm, lr_factor(step, trainer.num_steps, trainer.config.optimizer))
            stepper.drop_gradients()
            step += 1


@pytest.mark.parametrize("make_worker", [Threaded, Inline])
@pytest.mark.parametrize(
    "options",
    [{"depth": 2}, {"depth": 6}, {"mode": "exact_overlap", "depth": 2}, {"mode": "exact_overlap"}],
    ids=lambda options: f"{options.get('mode', 'sync')} {options.get('depth', '')}",
)
def test_sync_and_exact_overlap_are_the_serial_loop_bit_for_bit(
    options: dict[str, Any], make_worker: Callable[..., Any], sparse_config: Config, store: Store, tmp_path: Path
) -> None:
    serial = trainer_of(sparse_config, store, tmp_path / "serial")
    train_epochs(serial)
    trainer = trainer_of(with_pipeline(sparse_config, **options), store, tmp_path / "run", make_worker)
    trained = train_epochs(trainer)
    assert type(serial.executor) is Serial and type(trainer.executor) is not Serial
    assert len(trained) == serial.progress.step == trainer.progress.step == 40
    for ours, theirs in zip(weights(trainer), weights(serial), strict=True):
        assert torch.equal(ours, theirs)
    assert not any(pending.staleness for pending in trained)
    if options.get("mode") == "exact_overlap":
        shared = sum(pending.rows_shared for pending in trained) / sum(pending.rows_read for pending in trained)
        assert 0.1 < shared < 0.9, "the batches of this test must share some rows"
        for part in RowParts._fields:
            assert any(pending.after and getattr(pending.after[0], part).places.numel() for pending in trained), part


def test_the_inputs_of_a_batch_do_not_wait_for_rows_that_its_loss_alone_needs(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(with_pipeline(sparse(config), mode="exact_overlap"), store, tmp_path / "run")
    executor, encoded = trainer.executor, threading.Event()
    assert isinstance(executor, ExactOverlap)
    catch_up, encode, loss = executor._catch_up, trainer.model.encode, trainer.task.objective.loss
    filled: list[bool] = []

    def encode_then_tell(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        outputs = encode(rows, *args, **kwargs)
        encoded.set()
        return outputs

    def catch_up_after_encoding(*args: Any) -> Any:
        assert encoded.wait(60), "the forward pass waits for rows that it does not need"
        result = catch_up(*args)
        filled.append(True)
        return result

    def loss_with_all(outputs: torch.Tensor, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        encoded.clear()
        assert len(filled) == trainer.progress.step, "the loss must have all rows"
        return loss(outputs, rows, *args)

    monkeypatch.setattr(executor, "_catch_up", catch_up_after_encoding)
    monkeypatch.setattr(trainer.model, "encode", encode_then_tell)
    monkeypatch.setattr(trainer.task.objective, "loss", loss_with_all)
    train_epochs(trainer, 1)
    assert len(filled) == trainer.progress.step - 1 == 19


class LongOperations(TorchDispatchMode):
    """Collects operations, but for gathers and scatters, on tensors of `length` or more elements."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.count, self.found = length, 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        if func.overloadpacket.__name__ not in ("index", "index_select", "index_put_", "detach"):
            tensors = tensors_of([*args, result])
            self.found |= {str(func) for tensor in tensors if tensor.numel() >= self.length}
        return result


def operations_of_waiting(trainer: Trainer) -> LongOperations:
    """Train an epoch on a catalogue to which many unused rows are added; collect what is done with the table's."""
    stepper = trainer.stepper
    trainer.task.objective.draw = lambda batch, step: torch.zeros(batch.num_tokens, 1, dtype=torch.int64)
    trainer.executor = make_executor(stepper, trainer.config.pipeline, trainer.timeline, Inline)
    operations = LongOperations(trainer.store.num_items)
    wait = trainer.executor._wait

    def watched(pending: PendingBatch) -> PendingBatch:
        with operations:
            return wait(pending)

    trainer.executor._wait = watched
    train_epochs(trainer, 1)
    return operations


@pytest.mark.parametrize("mode", ["semi_async", "exact_overlap"])
def test_a_batch_costs_by_the_rows_that_it_reads_not_by_the_table(mode: str, config: Config, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", num_items=5000)
    trainer = trainer_of(with_pipeline(sparse(config), mode=mode), store, tmp_path / "run")
    operations = operations_of_waiting(trainer)
    assert operations.count and not operations.found


@pytest.mark.parametrize("mode", ["sync", "semi_async", "exact_overlap"])
@pytest.mark.parametrize("depth", [2, 4, 6])
def test_no_more_batches_are_in_pending_than_the_depth(
    mode: str, depth: int, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(with_pipeline(sparse(config), mode=mode, depth=depth), store, tmp_path / "run")
    executor, loaded, in_pending = trainer.executor, [], []
    assert isinstance(executor, Pipelined)
    load, update = executor._load, executor.update

    def count_and_load(*args: Any) -> PendingBatch:
        loaded.append(1)
        return load(*args)

    def count_and_update(*args: Any) -> None:
        time.sleep(0.005)  # a thread that could run ahead has done so by now
        in_pending.append(len(loaded) - trainer.progress.step)
        update(*args)

    monkeypatch.setattr(executor, "_load", count_and_load)
    monkeypatch.setattr(executor, "update", count_and_update)
    train_epochs(trainer, 1)
    assert max(in_pending) == depth


@pytest.mark.parametrize("make_worker", [Threaded, Inline])
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_semi_async_reads_exactly_what_the_definition_says(
    staleness: int, make_worker: Callable[..., Any], sparse_config: Config, store: Store, tmp_path: Path
) -> None:
    defined = trainer_of(sparse_config, store, tmp_path / "defined")
    train_by_definition(defined, staleness)
    config = with_pipeline(sparse_config, mode="semi_async", staleness=staleness)
    trainer = trainer_of(config, store, tmp_path / "run", make_worker)
    trained = train_epochs(trainer)
    for ours, theirs in zip(weights(trainer), weights(defined), strict=True):
        assert torch.equal(ours, theirs)
    assert [pending.staleness for pending in trained] == 2 * [min(step, staleness) for step in range(20)]


@pytest.mark.parametrize("make_worker", [Threaded, Inline])
@pytest.mark.parametrize(
    ("broken", "step", "missing"), [("an update is lost", 8, 3), ("rows are read early", 8, 3), ("read late", 7, 1)]
)
def test_a_broken_schedule_never_reads_rows_of_another_staleness(
    broken: str,
    step: int,
    missing: int,
    make_worker: Callable[..., Any],
    config: Config,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = trainer_of(
        with_pipeline(sparse(config), mode="semi_async", staleness=2), store, tmp_path / "run", make_worker
    )
    executor = trainer.executor
    assert isinstance(executor, SemiAsync)
    update_later, read_ahead = executor._update_later, executor._read_ahead

    def lose(work: Any, pending: PendingBatch, *arguments: Any) -> None:
        if pending.step != 4:  # counted from 0; the look-up of number 7 is the first that must see it
            update_later(work, pending, *arguments)

    def read_early(number: int) -> None:
        for wanted in {6: [6, 7], 7: []}.get(number, [number]):
            read_ahead(wanted)

    def count_twice(work: Any, pending: PendingBatch, *arguments: Any) -> None:
        update_later(work, pending, *arguments)
        if pending.step == 3:
            update_later(work, pending, *arguments)

    if broken == "rows are read early":
        monkeypatch.setattr(executor, "_read_ahead", read_early)
    else:
        monkeypatch.setattr(executor, "_update_later", lose if "lost" in broken else count_twice)
    message = f"rows of step {step} would miss {missing} updates instead of 2, and pipeline.staleness is 2"
    with pytest.raises(StageFailed, match=message) as raised:
        train_epochs(trainer)
    assert isinstance(raised.value.__cause__, StalenessError)


@pytest.mark.parametrize("mode", ["sync", "semi_async", "exact_overlap"])
@pytest.mark.parametrize("seed", range(3))
def test_delays_in_every_stage_change_nothing(
    mode: str, seed: int, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_pipeline(sparse(config), mode=mode, depth=5, staleness=2)
    undisturbed = trainer_of(config, store, tmp_path / "undisturbed", Inline)
    train_epochs(undisturbed, 1)
    chance = random.Random(seed)

    def delayed(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_do(*args: Any) -> Any:
            time.sleep(chance.choice([0.0, 0.0, 0.001, 0.006]))
            return original(*args)

        return wait_and_do

    trainer = trainer_of(config, store, tmp_path / "run")
    for name in (*STAGES.values(), *BESIDE, "update", "reduce", "fetch", "measure"):
        if hasattr(trainer.executor, name):
            monkeypatch.setattr(trainer.executor, name, delayed(getattr(trainer.executor, name)))
    monkeypatch.setattr(trainer.stepper, "compute", delayed(trainer.stepper.compute))
    trained = train_epochs(trainer, 1)
    assert max(pending.staleness for pending in trained) == (2 if mode == "semi_async" else 0)
    for ours, theirs in zip(weights(trainer), weights(undisturbed), strict=True):
        assert torch.equal(ours, theirs)


def places_that_can_fail() -> Iterator[tuple[str, str, str, int]]:
    """Yield (mode, what fails, the stage it belongs to, how many steps later than the call's number that is)."""
    for mode in MODES:
        yield mode, "executor.fetch", "embed", 0
        yield mode, "stepper.compute", "dense", 0
        yield mode, "stepper.gradients.finish", "reduce", 0
        yield mode, "stepper.agree", "agree", 0
        yield mode, "stepper.update_dense", "update", 0
        if mode == "serial":
            yield mode, "loader._read", "load", 0
            yield mode, "task.prepare", "load", 0
            yield mode, "tables.fetch", "embed", 0
        else:
            yield from ((mode, f"executor.{name}", stage, 0) for stage, name in STAGES.items() if stage != "embed")
        if mode in ("serial", "sync"):
            yield mode, "stepper.update_rows", "update", 0
        else:
            yield mode, "executor._read", "embed", 0
    yield "semi_async", "executor._update_rows", "embed", 0
    yield from (("exact_overlap", f"executor.{name}", "embed", int(name == "_catch_up")) for name in BESIDE[1:])


def fail_at_call(patch: pytest.MonkeyPatch, trainer: Trainer, place: str, number: int, error: BaseException) -> None:
    """Let the `number`-th call of the function at `place` raise."""
    owner: Any = trainer
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise error
        return original(*args, **kwargs)

    patch.setattr(owner, name, failing)


@pytest.mark.parametrize(("mode", "place", "stage", "later"), list(places_that_can_fail()))
@pytest.mark.parametrize("error", [OSError("disk on fire"), UserError("a bad day; try tomorrow")])
def test_an_error_in_any_stage_of_any_mode_surfaces_with_its_stage_and_step(
    mode: str,
    place: str,
    stage: str,
    later: int,
    error: Exception,
    config: Config,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = trainer_of(with_pipeline(sparse(config), **MODES[mode]), store, tmp_path / "run")
    fail_at_call(monkeypatch, trainer, place, 8, error)
    where = f"stage '{stage}' of step {8 + later}"
    expected = f"{error} (in {where})" if isinstance(error, UserError) else f"{where} failed: OSError: {error}"
    with pytest.raises(UserError if isinstance(error, UserError) else StageFailed) as raised:
        train_epochs(trainer)
    assert str(raised.value) == expected, "reported once, wherever it was raised"
    assert raised.value.__cause__ is error
    assert trainer.progress.step < 10
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("turbogr-")]


@pytest.mark.parametrize("place", [*(f"executor.{name}" for name in STAGES.values()), "stepper.compute"])
def test_what_is_no_error_surfaces_too(
    place: str, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(with_pipeline(sparse(config), mode="exact_overlap"), store, tmp_path / "run")
    fail_at_call(monkeypatch, trainer, place, 8, SystemExit(3))
    # Nobody sees a worker's thread end; in the main thread it is as it is, as Ctrl-C must be.
    with pytest.raises(SystemExit if place == "stepper.compute" else StageFailed, match="3"):
        train_epochs(trainer)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("turbogr-")]


@pytest.mark.parametrize("mode", ["serial", "exact_overlap"])
def test_the_command_line_says_where_a_step_failed(
    mode: str,
    config: Config,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(with_pipeline(sparse(config), **MODES[mode])))
    command = ["train", str(recipe), "--data", str(store.path), "--out"]
    compute, failures = Stepper.compute, [UserError("a bad day; try tomorrow"), ValueError("shapes differ")]

    def failing(self: Stepper, batch: Any, working_sets: Any, step: int) -> Any:
        if step == 3:
            raise failures[0]
        return compute(self, batch, working_sets, step)

    monkeypatch.setattr(Stepper, "compute", failing)
    assert cli.main([*command, str(tmp_path / "user")]) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed == "turbogr: error: a bad day; try tomorrow (in stage 'dense' of step 4)"
    del failures[0]
    with pytest.raises(StageFailed, match="stage 'dense' of step 4 failed: ValueError: shapes differ"):
        cli.main([*command, str(tmp_path / "bug")])  # a bug of ours keeps its traceback


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"mode": "semi_async"}, [1]),
        ({"mode": "semi_async"}, [20]),
        ({"mode": "semi_async", "staleness": 3}, [2, 1]),
        ({"mode": "semi_async", "staleness": 3}, [23, 4]),
        ({"mode": "exact_overlap"}, [3, 18]),
        ({"depth": 4}, [5]),
    ],
)
def test_stopping_anywhere_and_resuming_changes_nothing(
    steps: list[int],
    options: dict[str, Any],
    config: Config,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = with_pipeline(sparse(config), **options)
    train(config, store.path, tmp_path / "straight")
    for count in steps:
        with monkeypatch.context() as patch:
            stop_after(patch, count)
            result = train(config, store.path, tmp_path / "stopped", resume=True)
        assert (result.status, result.signal) == ("interrupted", signal.SIGTERM)
    in_pending = Checkpoints(tmp_path / "stopped").progress(sum(steps)).earlier_tables
    wanted = options.get("staleness", 1) if options.get("mode") == "semi_async" else 0
    assert in_pending == min(sum(steps) % 20, wanted)
    assert train(config, store.path, tmp_path / "stopped", resume=True).status == "finished"
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize(
    "modes",
    [("sync", "exact_overlap", "sync"), ("exact_overlap", "sync", "exact_overlap")],
    ids=" to ".join,
)
def test_modes_of_the_same_weights_may_take_turns_in_a_run(
    modes: tuple[str, ...],
    config: Config,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = sparse(config)
    train(config, store.path, tmp_path / "straight")
    for mode, steps in zip(modes[:2], (7, 16), strict=True):  # within the first and within the second epoch
        with monkeypatch.context() as patch:
            stop_after(patch, steps)
            result = train(with_pipeline(config, mode=mode), store.path, tmp_path / "turns", resume=True)
        assert result.status == "interrupted"
    result = train(with_pipeline(config, mode=modes[2]), store.path, tmp_path / "turns", resume=True)
    assert result.status == "finished"
    assert f"resuming with pipeline.mode={modes[2]} (was {modes[1]})" in capsys.readouterr().err
    straight, turns = (final_tensors(config, store, tmp_path / name) for name in ("straight", "turns"))
    assert straight.keys() == turns.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, turns[name]), name


@pytest.mark.parametrize(
    ("before", "after"),
    [("sync", "semi_async"), ("semi_async", "sync"), ("semi_async", "exact_overlap"), ("exact_overlap", "semi_async")],
)
def test_the_mode_may_change_when_a_run_is_resumed(
    before: str,
    after: str,
    config: Config,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = sparse(config)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        train(with_pipeline(config, mode=before), store.path, tmp_path / "run")
    resumed = with_pipeline(config, mode=after)
    assert train(resumed, store.path, tmp_path / "run", resume=True).status == "finished"
    # What comes out is seven steps of one mode and the rest in the other, each as the mode alone is tested.
    trainer = trainer_of(with_pipeline(config, mode=before), store, tmp_path / "by hand", Inline)
    with trainer.batches() as batches:
        for pending in itertools.islice(batches, 7):
            trainer.step(pending)
    trainer.executor.finish_updates()
    past = trainer.executor.past_weights()
    trainer.executor = make_executor(trainer.stepper, resumed.pipeline, trainer.timeline, Inline)
    trainer.executor.restore_past_weights(past)
    train_epochs(trainer)
    made = final_tensors(resumed, store, tmp_path / "run")
    assert torch.equal(trainer.tables.gather("item"), made["tables.item.weight"])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, made[f"model.{name}"]), name


def test_a_value_that_is_not_finite_stops_before_any_weight_is_touched(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_pipeline(sparse(config), mode="semi_async")
    compute = Stepper.compute

    def poisoned(self: Stepper, batch: Any, working_sets: Any, step: int) -> Any:
        return compute(self, batch, working_sets, step) * (float("nan") if step == 5 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "compute", poisoned)
        with pytest.raises(UserError, match="not finite at step 6"):
            train(config, store.path, tmp_path / "run")
    assert Checkpoints(tmp_path / "run").newest() == 5
    train(config, store.path, tmp_path / "run", resume=True)
    train(config, store.path, tmp_path / "straight")
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize("mode", ["sync", "semi_async", "exact_overlap"])
def test_records_say_where_the_time_went_and_what_reads_saw(
    mode: str, config: Config, store: Store, tmp_path: Path
) -> None:
    train(with_pipeline(sparse(config), mode=mode), store.path, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if record["kind"] == "train"]
    for record in training:
        shares = [record[f"{name}_share"] for name in ("compute", "exposed_sparse", "exposed_dense", "idle")]
        assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0.0
        assert record["exposed_sparse_share"] == record["exposed_dense_share"] == 0.0
    assert max(record["staleness"] for record in training) == (1 if mode == "semi_async" else 0)
    assert ("collision_rate" in training[0]) == (mode != "sync")
    assert all(0.0 < record.get("collision_rate", 0.5) < 1.0 for record in metrics(tmp_path / "run"))
    trace = json.loads((tmp_path / "run/timeline.json").read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    stages = {event["name"] for event in spans}
    assert {"embed", "dense", "update"} <= stages
    assert (stages >= {"load", "exchange", "wait"}) == (mode != "sync")
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert {event["args"]["step"] for event in spans if event["name"] == "dense"} == set(range(40))


def test_a_timeline_keeps_the_newest_spans() -> None:
    kept = Timeline()
    for step in range(10_000):
        with kept.span("main", "dense", step):
            pass
    events = kept.to_trace()["traceEvents"]
    assert len(events) == 1 + 4096 and events[-1]["args"]["step"] == 9999
    assert events[0]["args"]["name"] == "main"


def events_of(path: Path) -> list[dict[str, Any]]:
    opening, *lines = path.read_text().splitlines()
    assert opening == "["
    return [json.loads(line.removesuffix(",")) for line in lines]


@pytest.mark.parametrize("mode", ["sync", "exact_overlap"])
def test_all_stages_of_all_steps_can_be_kept(
    mode: str, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_KEPT", 20)
    monkeypatch.setattr(timeline, "_AT_ONCE", 50)
    config = with_pipeline(sparse(config), mode=mode)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, timeline="all"))
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        train(config, store.path, tmp_path / "run")
    path = tmp_path / "run/timeline/rank-0.json"
    before = events_of(path)
    with path.open("ab") as file:
        file.write(b'{"ph": "X", "name": "den')  # what a kill may leave
    train(config, store.path, tmp_path / "run", resume=True)
    events = events_of(path)
    assert events[: len(before)] == before
    spans = [event for event in events if event["ph"] == "X"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    for name in ("embed", "dense", "reduce", "agree", "update"):
        own = [event for event in spans if event["name"] == name and lanes[event["tid"]] == "main"]
        assert {event["args"]["step"] for event in own} == set(range(40)), name
        assert [event["ts"] for event in own] == sorted(event["ts"] for event in own)
    stages = {(lanes[event["tid"]], event["name"]) for event in spans}
    assert (("wait", "wait") in stages) == (mode == "exact_overlap")


def test_by_default_the_newest_spans_alone_are_kept(config: Config, store: Store, tmp_path: Path) -> None:
    train(sparse(config), store.path, tmp_path / "run")
    assert (tmp_path / "run/timeline.json").exists() and not (tmp_path / "run/timeline").exists()


def test_a_depth_that_a_mode_cannot_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"pipeline\.depth 2 is too small for pipeline\.mode 'semi_async'.*set it to 3"):
        PipelineConfig(mode="semi_async", staleness=2, depth=2).check()
    with pytest.raises(UserError, match=r"pipeline\.staleness must be positive, got 0"):
        PipelineConfig(staleness=0).check()
    assert PipelineConfig().depth_on(1) == 1 and PipelineConfig().depth_on(2) == 6
    assert PipelineConfig(mode="semi_async", staleness=9).depth_on(1) == 11


@pytest.mark.parametrize("mode", [SemiAsync, ExactOverlap])
def test_an_update_that_has_failed_is_never_complete(mode: type[ReadsAhead]) -> None:
    """What survivors keep must have every update of its step: also after the error of an update was raised."""
    executor, lost = mode.__new__(mode), Job(torch.device("cpu"))
    lost.fail(RuntimeError("a rank is lost"))
    executor._updates = deque([lost])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rank is lost"):
            executor.finish_updates()
        assert not executor.is_complete()
