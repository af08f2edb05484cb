"""A run ends with the same weights and metrics whatever happened on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import write_store
from turbogr import accelerators, checkpoints, machine
from turbogr import checkpoint_writer as writer
from turbogr.checkpoints import Checkpoints
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.scorer import ModelScorer
from turbogr.parallel import safetensors_file
from turbogr.runs import load_model
from turbogr.training import metric_log as tracking
from turbogr.training import run_summary as summary
from turbogr.training.bad_steps import NonFiniteError
from turbogr.training.run import resolve_against, train
from turbogr.training.step import Stepper
from turbogr.training.trainer import Trainer, is_worse

_CLOCK = {
    *("elapsed", "tokens_per_second", "sequences_per_second", "mfu_strict", "mfu_nominal", "evaluation_seconds"),
    *("compute_share", "exposed_sparse_share", "exposed_dense_share", "idle_share"),
}


def final_tensors(config: Config, store: Store, run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, flattened to names."""
    fresh = Trainer(resolve_against(config, store), store, run, device=torch.device("cpu"), peak_flops=None)
    fresh.resume()
    flat: dict[str, torch.Tensor] = {}

    def collect(prefix: str, tree: Any) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                collect(f"{prefix}{key}.", value)
            else:
                flat[f"{prefix}{key}"] = value.detach().clone()

    collect("", fresh.state())
    return flat


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run without what depends on the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in _CLOCK} for line in lines]


def assert_same_end(config: Config, store: Store, left: Path, right: Path) -> None:
    ours, theirs = final_tensors(config, store, left), final_tensors(config, store, right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert metrics(left) == metrics(right)
    assert Checkpoints(left).best() == Checkpoints(right).best()


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Send SIGTERM to this process after some steps of the next run, once."""
    left = [steps]
    advance = tracking.Tracker.advance

    def counted(self: tracking.Tracker) -> None:
        advance(self)
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(tracking.Tracker, "advance", counted)


@pytest.mark.parametrize("steps", range(1, 12))
def test_stopping_after_any_step_and_resuming_changes_nothing(
    steps: int, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(config, store.path, tmp_path / "straight").status == "finished"
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        result = train(config, store.path, tmp_path / "stopped")
    assert (result.status, result.signal, result.step) == ("interrupted", signal.SIGTERM, steps)
    assert json.loads((tmp_path / "stopped/run.json").read_text())["status"] == "interrupted"
    assert train(config, store.path, tmp_path / "stopped", resume=True).status == "finished"
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")


def test_stopping_inside_an_evaluation_and_resuming_changes_nothing(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config, store.path, tmp_path / "straight")
    score = ModelScorer.score
    with monkeypatch.context() as patch:

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return score(*args, **kwargs)

        patch.setattr(ModelScorer, "score", interrupted)
        result = train(config, store.path, tmp_path / "stopped")
    assert (result.status, result.signal) == ("interrupted", signal.SIGINT)
    assert not [record for record in metrics(tmp_path / "stopped") if record["kind"] == "eval"]
    train(config, store.path, tmp_path / "stopped", resume=True)
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")


def test_a_crash_between_checkpoints_loses_only_the_steps_since(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, checkpoint_every=2))
    train(config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        calls = []

        def crash(self: tracking.Tracker) -> None:
            calls.append(1)
            if len(calls) == 7:
                raise RuntimeError("power cut")

        patch.setattr(tracking.Tracker, "advance", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(config, store.path, tmp_path / "crashed")
    assert Checkpoints(tmp_path / "crashed").newest() == 6
    assert json.loads((tmp_path / "crashed/run.json").read_text())["status"] == "failed"
    train(config, store.path, tmp_path / "crashed", resume=True)
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "crashed")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    config: Config, store: Store, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        train(config, store.path, tmp_path / name)
    assert_same_end(config, store, tmp_path / "a", tmp_path / "b")
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    train(other, store.path, tmp_path / "c")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


def test_training_lowers_the_loss(config: Config, store: Store, tmp_path: Path) -> None:
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=30))
    train(longer, store.path, tmp_path / "run")
    losses = [record["loss"] for record in metrics(tmp_path / "run") if record["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]


def test_a_token_budget_resumes_exactly_too(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataclasses.replace(config.data, batch_size=None, batch_tokens=200, window="split")
    config = dataclasses.replace(config, data=data)
    train(config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        train(config, store.path, tmp_path / "stopped")
    train(config, store.path, tmp_path / "stopped", resume=True)
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("background", [True, False])
def test_buffers_for_saves_in_the_background_are_made_after_the_first_step(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, background_save=background))
    events: list[str] = []
    step, prepare, copy = Trainer._step_and_profile, writer.Copies._prepare, writer.Copies.of

    def noted_step(trainer: Trainer, pending: Any) -> None:
        events.append("step")
        step(trainer, pending)

    def noted_prepare(copies: writer.Copies, shapes: Any) -> None:
        events.append("prepare")
        prepare(copies, shapes)
        assert {name for name, *_ in shapes} == copies._buffers.keys()

    def noted_copy(copies: writer.Copies, parts: Any) -> Any:
        events.append(f"{len(copies._missing(parts)) if copies._preparing is None else 0} missing")
        return copy(copies, parts)

    monkeypatch.setattr(Trainer, "_step_and_profile", noted_step)
    monkeypatch.setattr(writer.Copies, "_prepare", noted_prepare)
    monkeypatch.setattr(writer.Copies, "of", noted_copy)
    assert train(config, store.path, tmp_path / "run").status == "finished"
    if background:
        assert events[:2] == ["step", "prepare"] and events.count("prepare") == 1
        assert {event for event in events if event.endswith("missing")} == {"0 missing"}
    else:
        assert set(events) == {"step"}


def test_steps_limit_ends_inside_an_epoch_with_an_evaluation(config: Config, store: Store, tmp_path: Path) -> None:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))
    result = train(config, store.path, tmp_path / "run")
    assert (result.status, result.step) == ("finished", 5)
    assert [record["step"] for record in metrics(tmp_path / "run") if record["kind"] == "eval"] == [4, 5]


def test_patience_stops_early_and_keeps_the_best(config: Config, store: Store, tmp_path: Path) -> None:
    still = dataclasses.replace(config.optimizer, lr=1e-12, table_lr=1e-12)
    evaluate = dataclasses.replace(config.evaluate, patience=2)
    config = dataclasses.replace(
        config, optimizer=still, evaluate=evaluate, train=dataclasses.replace(config.train, epochs=50)
    )
    result = train(config, store.path, tmp_path / "run")
    assert (result.status, result.step, result.best_step) == ("stopped early", 12, 4)
    assert Checkpoints(tmp_path / "run").steps() == [4, 8, 12]
    trained = load_model(tmp_path / "run")
    assert trained.checkpoint.step == 4
    assert trained.tables["item"].shape == (store.num_items, 16)


def test_drops_within_the_noise_do_not_count_towards_patience(config: Config, store: Store, tmp_path: Path) -> None:
    still = dataclasses.replace(config.optimizer, lr=1e-12, table_lr=1e-12)  # no evaluation is better than the first
    evaluate = dataclasses.replace(config.evaluate, patience=1, min_drop=0.5)
    config = dataclasses.replace(config, optimizer=still, evaluate=evaluate)
    assert train(config, store.path, tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("value", "noise", "worse"), [(0.4, 0.0, True), (0.5, 0.0, True), (0.4, 0.2, False), (0.2, 0.2, True)]
)
def test_a_value_is_worse_where_it_is_further_away_than_the_noise(value: float, noise: float, worse: bool) -> None:
    assert is_worse(value, 0.5, noise) == worse and is_worse(1.0 - value, 0.5, noise) == worse
    assert is_worse(float("nan"), 0.5, noise)


def test_a_non_finite_gradient_stops_before_the_weights_are_touched(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    loss = Stepper.loss

    def poisoned(self: Stepper, batch: Any, working_set: Any, step: int) -> Any:
        value = loss(self, batch, working_set, step)
        return value * float("nan") if step == 5 else value

    monkeypatch.setattr(Stepper, "loss", poisoned)
    with pytest.raises(NonFiniteError, match=r"not finite at step 6; users of the batch: 1\d\d\d.*clip_norm"):
        train(config, store.path, run)
    monkeypatch.undo()
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    assert Checkpoints(run).newest() == 5
    train(config, store.path, tmp_path / "straight")
    train(config, store.path, run, resume=True)
    assert_same_end(config, store, run, tmp_path / "straight")


def test_a_full_disk_leaves_the_previous_checkpoint(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    save = writer.write_part
    calls = []

    def full(parts: Any, folder: Path, *numbers: int) -> None:
        calls.append(folder)
        save(parts, folder, *numbers)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(writer, "write_part", full)
    with pytest.raises(
        UserError, match=r"/step-8 could not be written, because the disk is full; .*--resume"
    ) as failed:
        train(config, store.path, run)
    assert ".part" not in str(failed.value)
    assert [entry.name for entry in sorted((run / "checkpoints").iterdir())] == ["best.json", "step-4"]
    monkeypatch.setattr(writer, "write_part", save)
    assert train(config, store.path, run, resume=True).status == "finished"


def test_an_existing_run_is_refused_and_untouched(config: Config, store: Store, tmp_path: Path) -> None:
    train(config, store.path, tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="already exists; choose another --out, continue it with --resume"):
        train(config, store.path, tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_resume_refuses_another_model_or_other_data(config: Config, store: Store, tmp_path: Path) -> None:
    train(config, store.path, tmp_path / "run")
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, num_blocks=2))
    with pytest.raises(UserError, match=r"started with model\.num_blocks=1, not 2"):
        train(wider, store.path, tmp_path / "run", resume=True)
    other = write_store(tmp_path / "other", seed=7)
    with pytest.raises(UserError, match="holds other data"):
        train(config, other.path, tmp_path / "run", resume=True)


def test_resume_may_train_longer(config: Config, store: Store, tmp_path: Path) -> None:
    train(config, store.path, tmp_path / "run")
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=5))
    assert train(longer, store.path, tmp_path / "run", resume=True).step == 20


def test_resume_refuses_to_train_less_than_was_trained(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lasting(**limits: int) -> Config:
        return dataclasses.replace(config, train=dataclasses.replace(config.train, **limits))

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        train(lasting(epochs=9), store.path, run)
    before = {path: path.read_bytes() for path in (run / "config.yaml", run / "run.json")}
    for limits, words in (
        ({"epochs": 1}, r"was trained for 1\.5 epochs already, and train\.epochs is 1; set it to 2 or more, or start"),
        ({"epochs": 9, "steps": 5}, r"was trained for 6 steps already, and train\.steps is 5; set it to 6 or more"),
    ):
        with pytest.raises(UserError, match=words):
            train(lasting(**limits), store.path, run, resume=True)
    assert {path: path.read_bytes() for path in before} == before
    assert train(lasting(epochs=9, steps=6), store.path, run, resume=True).step == 6
    assert train(lasting(epochs=2), store.path, run, resume=True).step == 8


def test_resume_refuses_a_folder_that_holds_something_else(config: Config, store: Store, tmp_path: Path) -> None:
    (tmp_path / "run" / "inside").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("run", "file"):
        with pytest.raises(UserError, match=r"is not a run folder .*choose another --out, or move away what is there"):
            train(config, store.path, tmp_path / name, resume=True)


def test_the_stored_config_starts_the_same_run_again(config: Config, store: Store, tmp_path: Path) -> None:
    train(config, store.path, tmp_path / "run")
    train(tmp_path / "run/config.yaml", store.path, tmp_path / "again")
    assert_same_end(config, store, tmp_path / "run", tmp_path / "again")


def test_an_unknown_device_is_named(config: Config, store: Store, tmp_path: Path) -> None:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="gpu9"))
    with pytest.raises(UserError, match=r"train\.device 'gpu9' cannot be used here"):
        accelerators.choose_device(config.train.device)
    with pytest.raises(UserError, match="gpu9"):
        train(config, store.path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("split", "part", "words"),
    [
        ("leave-one-out", "valid", ["no validation item", "; set evaluate.part=test or set data.split=leave-two-out"]),
        ("time:1000,1001", "valid", ["no validation item", "; set evaluate.part=test or set data.split=leave-two-out"]),
        ("time:2000,999999999", "test", ["no test item", "; set evaluate.part=valid or set data.split=leave-two-out"]),
        ("time:999999999", None, ["'test' (the default here)", "no test item", "; set data.split=leave-two-out"]),
    ],
)
def test_a_split_that_cannot_choose_a_checkpoint_is_refused_before_training(
    split: str, part: Any, words: list[str], config: Config, store: Store, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, split=split),
        evaluate=dataclasses.replace(config.evaluate, part=part),
    )
    with pytest.raises(UserError) as caught:
        train(config, store.path, tmp_path / "run")
    assert all(word in str(caught.value) for word in ["evaluate.part is ", f"'{split}'", *words]), caught.value
    assert not (tmp_path / "run").exists()


def test_a_part_that_is_not_held_out_is_refused_when_a_run_is_resumed(config: Config, tmp_path: Path) -> None:
    store, run = write_store(tmp_path / "store", split="leave-one-out"), tmp_path / "run"
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=1))
    train(config, store.path, run)
    before = (run / "run.json").read_bytes()
    other = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, part="valid"))
    with pytest.raises(UserError, match=r"set evaluate\.part=test"):
        train(other, store.path, run, resume=True)
    assert (run / "run.json").read_bytes() == before


def test_another_metric_restarts_the_selection(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, store.path, run)
    other = dataclasses.replace(
        config,
        evaluate=dataclasses.replace(config.evaluate, metric="ndcg@1"),
        train=dataclasses.replace(config.train, epochs=4),
    )
    result = train(other, store.path, run, resume=True)
    values = {r["step"]: r["ndcg@1"] for r in metrics(run) if r["kind"] == "eval" and r["step"] >= 12}
    assert result.best_step in values and result.best_value == max(values.values())


def test_another_rule_of_measuring_restarts_the_selection(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr("turbogr.tasks.retrieval.REPEATED", "ranked")
        train(config, store.path, run)
        assert summary.read_summary(run) is not None
    assert summary.read_summary(run) is None
    assert summary.is_outdated(run)
    step = Checkpoints(run).newest()
    assert train(config, store.path, run, resume=True).best_step == step, "nothing before it is of the same rule"
    assert summary.read_summary(run) is not None
    assert not summary.is_outdated(run)


def test_a_shortened_metrics_file_keeps_its_whole_lines(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, store.path, run)
    content = (run / "metrics.jsonl").read_bytes()
    first = content[: content.index(b"\n") + 1]
    (run / "metrics.jsonl").write_bytes(first + b'{"kind": "tr')
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4))
    with pytest.warns(UserWarning, match="shorter than the checkpoint remembers"):
        train(longer, store.path, run, resume=True)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert lines[0] == first and all(json.loads(line) for line in lines)


def test_a_start_that_was_killed_early_can_be_started_again(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model:\n")
    (run / ".run.json.abc.part").write_text("{")
    assert train(config, store.path, run, resume=True).status == "finished"


@pytest.mark.parametrize("moment", ["write_part", "publish_folder"])
def test_sigterm_inside_a_save_ends_after_it_and_resumes(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    module = writer if moment == "write_part" else checkpoints
    original, signals = getattr(module, moment), []

    def signalled(*args: Any) -> None:
        if not signals:
            signals.append(os.kill(os.getpid(), signal.SIGTERM))
        original(*args)

    monkeypatch.setattr(module, moment, signalled)
    run = tmp_path / "run"
    ended = train(config, store.path, run)
    assert ended.status == "interrupted" and ended.signal == signal.SIGTERM
    assert Checkpoints(run).newest_intact() == ended.step
    train(config, store.path, run, resume=True)
    train(config, store.path, tmp_path / "straight")
    assert_same_end(config, store, run, tmp_path / "straight")


def test_an_error_of_writing_tensors_names_the_checkpoint(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(number: int, text: str) -> Any:
        def write(path: Path, tensors: Any) -> None:
            raise OSError(number, text)  # as by a write, which names no file

        return write

    monkeypatch.setattr(safetensors_file, "write_tensors", failing(28, "No space left on device"))
    with pytest.raises(UserError, match=r"checkpoints/step-4 could not be written, because the disk is full"):
        train(config, store.path, tmp_path / "run")
    monkeypatch.setattr(safetensors_file, "write_tensors", failing(5, "Input/output error"))
    with pytest.raises(OSError, match=r"Input/output error: '.*/checkpoints/step-4/part-0\.safetensors'$"):
        train(config, store.path, tmp_path / "other")


def test_tensorboard_has_the_same_points_after_a_resume(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, tensorboard=True))

    def points(run: Path) -> list[tuple[int, float]]:
        events = accumulator.EventAccumulator(str(run / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("train/loss")]

    train(config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        train(config, store.path, tmp_path / "stopped")
    train(config, store.path, tmp_path / "stopped", resume=True)
    assert points(tmp_path / "stopped") == points(tmp_path / "straight")
