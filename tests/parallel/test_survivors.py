"""A rank is lost, and the job goes on from the last step of those that remain, with the same weights."""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parallel.ranks import run_ranks
from tests.parallel.training import train_run
from tests.training.test_pipeline import sparse, trainer_of, with_pipeline
from tests.training.test_run import assert_same_end, final_tensors, metrics
from turbogr.checkpoints import Checkpoints
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.parallel import heartbeat
from turbogr.training.step import Stepper
from turbogr.training.survivor_state import FOLDER, newest_parts, save_part
from turbogr.training.trainer import Trainer

LOST_IN_STEP = 13
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "semi_async": {"mode": "semi_async", "staleness": 2},
    "exact_overlap": {"mode": "exact_overlap"},
}


def train_and_lose(config: Config, store: Path, out: Path, lost: int) -> dict[str, Any]:
    """`train_run`, where the process of a rank ends in the middle of a step; the others are in its backward pass."""
    compute = Stepper.compute

    def ending(self: Stepper, batch: Any, sets: Any, step: int) -> Any:
        if step == LOST_IN_STEP and self.mesh.world.rank == lost:
            time.sleep(1.0)  # by now the updates of the step before are done
            os._exit(3)
        return compute(self, batch, sets, step)

    with mock.patch.object(Stepper, "compute", ending):
        return train_run(config, store, out)


def lose(size: int, config: Config, store: Path, out: Path, lost: int) -> None:
    """Train until a rank is lost."""
    with pytest.raises(AssertionError, match="the process ended without a result"):
        run_ranks(size, train_and_lose, config, store, out, lost)


def long(config: Config, groups: int, mode: str) -> Config:
    config = with_pipeline(sparse(config), **MODES[mode])
    train = dataclasses.replace(config.train, epochs=1, checkpoint_every=10)
    return dataclasses.replace(config, train=train, parallel=dataclasses.replace(config.parallel, groups=groups))


@pytest.mark.parametrize(("mode", "lost"), [("sync", 0), ("semi_async", 1), ("exact_overlap", 0)])
def test_no_step_is_lost_where_a_whole_group_remains(
    mode: str, lost: int, config: Config, store_path: Path, tmp_path: Path
) -> None:
    """Resumed on as many ranks it is bit for bit the run that nothing has interrupted, records included."""
    config = long(config, 2, mode)
    run_ranks(2, train_run, config, store_path, tmp_path / "straight")
    lose(2, config, store_path, tmp_path / "run", lost)
    assert Checkpoints(tmp_path / "run").newest() == 10
    (part,) = newest_parts(tmp_path / "run", 10)
    assert part.name.startswith(f"step-{LOST_IN_STEP}-member-0-of-1-group-{1 - lost}-")
    begun = run_ranks(2, first_step_of_resumed, config, store_path, tmp_path / "run")
    assert begun == [LOST_IN_STEP] * 2
    assert_same_end(config, Store.open(store_path), tmp_path / "straight", tmp_path / "run")
    assert not (tmp_path / "run" / FOLDER).exists()


def first_step_of_resumed(config: Config, store: Path, out: Path) -> int:
    """Resume to the end; return the first step."""
    step, steps = Trainer.step, []

    def noting(self: Trainer, batch: Any) -> None:
        steps.append(self.progress.step)
        step(self, batch)

    with mock.patch.object(Trainer, "step", noting):
        end = train_run(config, store, out, resume=True)
    assert end["status"] == "finished", end
    return steps[0]


def test_on_other_ranks_only_the_rounding_differs(config: Config, store_path: Path, tmp_path: Path) -> None:
    """Four ranks, two groups: one is lost, the other group goes on alone, with semi-asynchronous tables."""
    config = long(config, 2, "semi_async")
    run_ranks(4, train_run, config, store_path, tmp_path / "straight")
    lose(4, config, store_path, tmp_path / "run", 1)
    parts = newest_parts(tmp_path / "run", 10)
    assert [part.name.split("-group")[0] for part in parts] == [f"step-13-member-{m}-of-2" for m in (0, 1)]
    alone = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, groups=None))
    assert first_step_of_resumed(alone, store_path, tmp_path / "run") == LOST_IN_STEP
    ours, theirs = (final_tensors(alone, Store.open(store_path), tmp_path / name) for name in ("run", "straight"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=2e-3, atol=2e-5, msg=name)


def test_without_a_whole_group_the_last_checkpoint_counts(config: Config, store_path: Path, tmp_path: Path) -> None:
    config = long(config, 1, "sync")
    run_ranks(2, train_run, config, store_path, tmp_path / "straight")
    lose(2, config, store_path, tmp_path / "run", 1)
    assert len(list((tmp_path / "run" / FOLDER).iterdir())) == 1 and not newest_parts(tmp_path / "run", 10)
    assert run_ranks(2, first_step_of_resumed, config, store_path, tmp_path / "run") == [10, 10]
    assert_same_end(config, Store.open(store_path), tmp_path / "straight", tmp_path / "run")


def test_a_damaged_part_is_not_taken(config: Config, store_path: Path, tmp_path: Path) -> None:
    trainer = trainer_of(sparse(config), Store.open(store_path), tmp_path)
    trainer.progress.step = 13
    path = save_part(tmp_path, trainer.stepper, trainer.progress, [])
    assert newest_parts(tmp_path, 12) == [path] and not newest_parts(tmp_path, 13)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert not newest_parts(tmp_path, 12)


def test_a_part_that_cannot_be_written_is_an_error_of_the_disk(
    config: Config, store_path: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(config, Store.open(store_path), tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="it could not be written: the disk may be full"):
            save_part(tmp_path, trainer.stepper, trainer.progress, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / FOLDER).iterdir()) == []


def train_with_a_stopped_rank(config: Config, store: Path, out: Path) -> dict[str, Any]:
    """Rank 1 stops to send heartbeats and to compute; the other one's heartbeat ends its process."""
    heartbeat._INTERVAL_SECONDS = 0.1
    compute = Stepper.compute

    def stopping(self: Stepper, batch: Any, sets: Any, step: int) -> Any:
        if step == LOST_IN_STEP and self.mesh.world.rank == 1:
            os.kill(os.getpid(), 19)
        return compute(self, batch, sets, step)

    with mock.patch.object(Stepper, "compute", stopping):
        return train_run(config, store, out)


def test_the_state_is_kept_when_a_rank_hangs(config: Config, store_path: Path, tmp_path: Path) -> None:
    """The main thread waits for ever then; the heartbeat's thread writes."""
    config = long(config, 2, "sync")
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout=1.0))
    with mock.patch("tests.parallel.ranks._receive", receive_the_first()), pytest.raises(AssertionError):
        run_ranks(2, train_with_a_stopped_rank, config, store_path, tmp_path / "run")
    (part,) = newest_parts(tmp_path / "run", 10)
    assert part.name.startswith(f"step-{LOST_IN_STEP}-member-0-of-1-group-0-")
    assert not [record for record in metrics(tmp_path / "run") if record["step"] > LOST_IN_STEP]


def receive_the_first() -> Any:
    """Nobody waits for the result of a rank that is stopped."""
    from tests.parallel import ranks

    original, calls = ranks._receive, []

    def receive(pipe: Any) -> tuple[bool, Any]:
        calls.append(1)
        return original(pipe) if len(calls) == 1 else (False, "stopped")

    return receive
