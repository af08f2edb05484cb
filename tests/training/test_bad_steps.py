"""A step whose loss or gradient is not finite is left out, in every mode and bit for bit, and never silently."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_pipeline import sparse, train_by_definition, train_epochs, trainer_of, weights, with_pipeline
from tests.training.test_run import assert_same_end, final_tensors, metrics, stop_after
from turbogr.chaos.bad_values import bad_values
from turbogr.chaos.fault_plan import BAD_VALUES
from turbogr.checkpoints import Checkpoints
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.training.bad_steps import NonFiniteError
from turbogr.training.run import train
from turbogr.training.step import Stepper
from turbogr.training.trainer import Trainer

MODES: dict[str, dict[str, Any]] = {
    "serial": {},
    "sync": {"depth": 4},
    "semi_async": {"mode": "semi_async", "staleness": 2},
    "exact_overlap": {"mode": "exact_overlap"},
}


def with_policy(config: Config, policy: str, **options: Any) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, on_bad_step=policy, **options))


@pytest.mark.parametrize("optimizer", ["adam", "adagrad clipped"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_a_skipped_step_is_one_without_that_update(
    mode: str, optimizer: str, config: Config, store: Store, tmp_path: Path
) -> None:
    """Weights, optimiser state and step counts, with two bad steps in a row and the last one of an epoch."""
    config = with_policy(sparse(config, optimizer), "skip")
    left_out = {5, 6, 19}
    defined = trainer_of(config, store, tmp_path / "defined")
    train_by_definition(defined, MODES[mode].get("staleness", 0), epochs=1, left_out=left_out)
    for kind in BAD_VALUES:
        trainer = trainer_of(with_pipeline(config, **MODES[mode]), store, tmp_path / "run")
        with bad_values(kind, left_out):
            train_epochs(trainer, 1)
        assert trainer.progress.skipped_steps == [6, 7, 20] and trainer.progress.step == 20
        for ours, theirs in zip(weights(trainer), weights(defined), strict=True):
            assert torch.equal(ours, theirs)
        dense = trainer.stepper.dense_optimizer.state()
        for name, state in defined.stepper.dense_optimizer.state().items():
            assert all(torch.equal(dense[name][part], tensor) for part, tensor in state.items())
            assert int(state["step"]) == 17


@pytest.mark.parametrize("mode", ["sync", "semi_async", "exact_overlap"])
def test_stopping_after_a_skip_and_resuming_changes_nothing(
    mode: str, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_policy(with_pipeline(sparse(config), **MODES[mode]), "skip")
    with bad_values("rows", {5}):
        straight = train(config, store.path, tmp_path / "straight")
        with monkeypatch.context() as patch:
            stop_after(patch, 6)
            assert train(config, store.path, tmp_path / "stopped").step == 6
    assert straight.skipped_steps == (6,)
    assert train(config, store.path, tmp_path / "stopped", resume=True).skipped_steps == (6,)
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")


def test_what_was_skipped_is_in_the_records_the_summary_and_the_output(
    config: Config, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with bad_values("dense", {4}):
        train(with_policy(config, "skip"), store.path, run)
    (record,) = [record for record in metrics(run) if record["kind"] == "bad_step"]
    assert (record["step"], record["action"], record["ranks"]) == (5, "skipped", [0])
    assert record["what"].startswith("the gradient of ") and re.match(r"1\d\d\d, ", record["users"])
    assert json.loads((run / "summary.json").read_text())["skipped_steps"] == [5]
    assert f"{record['what']} is not finite at step 5; users of the batch: 1" in capsys.readouterr().err
    recorded = [record["step"] for record in metrics(run) if record["kind"] == "train" and record["loss"]]
    assert recorded == [3, 4, 6, 8, 9, 12]


@pytest.mark.parametrize("mode", ["serial", "semi_async", "exact_overlap"])
def test_going_back_to_a_checkpoint_ends_as_leaving_the_step_out(
    mode: str, config: Config, store: Store, tmp_path: Path
) -> None:
    config = with_pipeline(sparse(config), **MODES[mode])
    options: dict[str, Any] = {"checkpoint_every": 4, "epochs": 1}
    with bad_values("rows", {2, 9, 10}):
        train(with_policy(config, "skip", **options), store.path, tmp_path / "skip")
        back = with_policy(config, "rewind", **options)
        assert train(back, store.path, tmp_path / "rewind").skipped_steps == (3, 10, 11)
    ours, theirs = (final_tensors(config, store, tmp_path / name) for name in ("rewind", "skip"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    records = {name: metrics(tmp_path / name) for name in ("skip", "rewind")}
    bad = [(r["step"], r["action"]) for r in records["rewind"] if r["kind"] == "bad_step"]
    assert bad == [(3, "went back to step 0"), (10, "went back to step 8"), (11, "went back to step 8")]
    without = [[record for record in found if record["kind"] != "bad_step"] for found in records.values()]
    assert without[0] == without[1]


def test_going_back_replaces_damaged_weights_and_passes_a_damaged_checkpoint(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipping could not help: with such weights every step is bad."""
    config = with_policy(config, "rewind", checkpoint_every=2)
    monkeypatch.setattr(Trainer, "_checkpoint", damaging(Trainer._checkpoint, step=6))
    train(config, store.path, tmp_path / "damaged")
    monkeypatch.undo()
    with bad_values("loss", {6}):
        train(with_policy(config, "skip"), store.path, tmp_path / "straight")
    ours, theirs = (final_tensors(config, store, tmp_path / name) for name in ("damaged", "straight"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    (record,) = [record for record in metrics(tmp_path / "damaged") if record["kind"] == "bad_step"]
    assert (record["step"], record["action"]) == (7, "went back to step 4")


def damaging(checkpoint: Any, step: int) -> Any:
    """Damage a weight before the checkpoint of a step is written for the first time."""
    done: list[int] = []

    def damaged(self: Trainer, tracker: Any) -> None:
        if self.progress.step == step and not done:
            done.append(step)
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = float("nan")
        checkpoint(self, tracker)

    return damaged


def test_a_kill_after_going_back_forgets_no_skipped_step(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the value is bad once only, so a resumed run would train on the batch if it did not know."""
    config = with_policy(config, "rewind", checkpoint_every=4)
    step = Trainer.step

    def crash(self: Trainer, batch: Any) -> None:
        if self.progress.skipped_steps:
            raise RuntimeError("power cut")
        step(self, batch)

    with monkeypatch.context() as patch, bad_values("loss", {6}):
        patch.setattr(Trainer, "step", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(config, store.path, tmp_path / "killed")
    assert train(config, store.path, tmp_path / "killed", resume=True).skipped_steps == (7,)
    with bad_values("loss", {6}):
        train(config, store.path, tmp_path / "straight")
    assert_same_end(config, store, tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize("policy", ["skip", "rewind"])
@pytest.mark.parametrize(
    ("steps", "message", "newest"),
    [
        (range(3, 12), r"at step 6; users.* The 2 steps before it .* train\.max_bad_steps_in_a_row is 2", 5),
        (range(0, 12, 2), r"at step 7; users.*3 steps have been left out already, and train\.max_bad_steps is 3", 6),
    ],
)
def test_too_many_bad_steps_end_the_run(
    steps: range, message: str, newest: int, policy: str, config: Config, store: Store, tmp_path: Path
) -> None:
    config = with_policy(config, policy, max_bad_steps_in_a_row=2, max_bad_steps=3)
    with bad_values("loss", steps), pytest.raises(NonFiniteError, match=message):
        train(config, store.path, tmp_path / "run")
    assert Checkpoints(tmp_path / "run").newest() == newest
    more = with_policy(config, policy, max_bad_steps_in_a_row=9, max_bad_steps=9)
    with bad_values("loss", steps):
        assert len(train(more, store.path, tmp_path / "run", resume=True).skipped_steps) == len(steps)


def test_a_value_that_is_finite_when_computed_again_points_to_the_machine(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Stepper.compute

    def flaky(self: Stepper, batch: Any, sets: Any, step: int) -> Any:
        return compute(self, batch, sets, step) * (float("inf") if step == 2 else 1.0)

    monkeypatch.setattr(Stepper, "compute", flaky)
    with pytest.raises(NonFiniteError, match=r"the loss is not finite at step 3; computed again .* faulty memory"):
        train(config, store.path, tmp_path / "run")
