"""The pipeline on real ranks: the same weights as the serial loop, and an end for all when one stage of one fails."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.training import make_trainer, train_run, whole_state
from tests.training.conftest import write_store
from tests.training.test_pipeline import (
    BESIDE,
    STAGES,
    events_of,
    operations_of_waiting,
    sparse,
    train_epochs,
    trainer_of,
    with_pipeline,
)
from tests.training.test_run import assert_same_end, metrics
from turbogr import machine
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.parallel.world import connected_world
from turbogr.training.pipeline import ExactOverlap, SemiAsync, make_executor
from turbogr.training.pipeline.workers import Inline
from turbogr.training.run import train
from turbogr.training.trainer import Trainer

MODES: dict[str, dict[str, Any]] = {
    "serial": {"depth": 1},
    "sync": {"depth": 4},
    "semi_async": {"mode": "semi_async", "staleness": 2},
    "exact_overlap": {"mode": "exact_overlap"},
}


def train_all_modes(config: Config, store: Path, run: Path, groups: int) -> dict[str, Any]:
    """Train an epoch in every mode, semi_async also without threads; threads are delayed at random, each rank's on its
    own. Return the states and how stale reads were."""
    results: dict[str, Any] = {}
    with connected_world() as world:
        chance = random.Random(world.rank)
        for name, options in [*MODES.items(), ("semi_async inline", MODES["semi_async"])]:
            trainer = make_trainer(with_pipeline(config, **options), store, run, world, groups)
            if "inline" in name:
                pipeline = trainer.config.pipeline
                trainer.executor = make_executor(trainer.stepper, pipeline, trainer.timeline, Inline)
            else:
                _delay(trainer, chance)
            trained = train_epochs(trainer, 1)
            shares = trainer.progress.window
            results[name] = {
                "state": {key: tensor.numpy() for key, tensor in whole_state(trainer).items()},
                "staleness": max(pending.staleness for pending in trained),
                "shared": (shares.rows_shared, shares.rows_read),
                "exposed": (shares.exposed_sparse, shares.exposed_dense, shares.idle, shares.seconds),
            }
    return results


def _delay(trainer: Trainer, chance: random.Random) -> None:
    for name in (*STAGES.values(), *BESIDE, "fetch", "reduce", "measure", "update"):
        original = getattr(trainer.executor, name, None)
        if original is None:
            continue

        def late(*args: Any, original: Any = original) -> Any:
            time.sleep(chance.choice([0.0, 0.0, 0.002, 0.005]))
            return original(*args)

        setattr(trainer.executor, name, late)


@pytest.mark.parametrize(
    ("groups", "members", "optimizer"), [(1, 2, "adam"), (2, 1, "adagrad clipped"), (2, 2, "adam")]
)
def test_every_mode_is_what_it_says_on_any_mesh(
    groups: int, members: int, optimizer: str, config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = sparse(config, optimizer)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, check_every=3))
    ranks = run_ranks(groups * members, train_all_modes, config, store_path, tmp_path, groups)
    first = ranks[0]
    single = trainer_of(with_pipeline(config, **MODES["exact_overlap"]), Store.open(store_path), tmp_path)
    train_epochs(single, 1)
    alone = single.progress.window
    assert 0 < alone.rows_shared < alone.rows_read
    for name, tensor in first["serial"]["state"].items():
        assert np.array_equal(first["sync"]["state"][name], tensor), name
        assert np.array_equal(first["exact_overlap"]["state"][name], tensor), name
        assert np.array_equal(first["semi_async"]["state"][name], first["semi_async inline"]["state"][name]), name
    weight = "tables.item.weight"
    assert not np.array_equal(first["semi_async"]["state"][weight], first["serial"]["state"][weight])
    for mode, result in first.items():
        assert result["staleness"] == (2 if "semi" in mode else 0)
        if mode not in ("serial", "sync"):
            # Every group counts the rows of the whole batch, in both modes, and as one process does.
            assert result["shared"] == (groups * alone.rows_shared, groups * alone.rows_read)
        sparse_wait, dense_wait, idle, seconds = result["exposed"]
        assert dense_wait > 0.0 and 0.0 <= sparse_wait + dense_wait + idle <= seconds
    assert first["serial"]["exposed"][0] > 0.0 or members == 1
    for rank in ranks:
        for mode, result in rank.items():
            assert np.array_equal(result["state"][weight], first[mode]["state"][weight])


def watch_waiting(config: Config, store: Path, run: Path, groups: int) -> tuple[int, set[str]]:
    with connected_world() as world:
        operations = operations_of_waiting(make_trainer(config, store, run, world, groups))
        return operations.count, operations.found


@pytest.mark.parametrize("mode", ["semi_async", "exact_overlap"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_batch_costs_by_the_rows_that_it_reads_not_by_the_shard(
    groups: int, mode: str, config: Config, tmp_path: Path
) -> None:
    store = write_store(tmp_path / "store", num_items=5000).path
    config = with_pipeline(sparse(config), mode=mode)
    for count, found in run_ranks(2, watch_waiting, config, store, tmp_path / "run", groups):
        assert count and not found


@pytest.mark.parametrize("mode", ["semi_async", "exact_overlap"])
def test_a_signal_and_resume_on_ranks_changes_nothing(
    mode: str, config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = with_pipeline(sparse(config), mode=mode)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, timeline="all"))
    straight = run_ranks(2, train_run, config, store_path, tmp_path / "straight")
    stopped = run_ranks(2, train_run, config, store_path, tmp_path / "stopped", 1)
    assert [end["status"] for end in straight] == ["finished"] * 2
    assert [end["status"] for end in stopped] == ["interrupted"] * 2
    assert stopped[0]["step"] == stopped[1]["step"] < straight[0]["step"]
    again = run_ranks(2, train_again, config, store_path, tmp_path / "stopped")
    assert [end["status"] for end in again] == ["finished"] * 2
    assert_same_end(config, Store.open(store_path), tmp_path / "straight", tmp_path / "stopped")
    for rank in (0, 1):
        spans = [event for event in events_of(tmp_path / f"stopped/timeline/rank-{rank}.json") if event["ph"] == "X"]
        assert {event["pid"] for event in spans} == {rank}
        assert {event["args"]["step"] for event in spans if event["name"] == "dense"} == set(range(40))


@pytest.mark.parametrize("optimizer", ["adam", "adagrad clipped"])
@pytest.mark.parametrize("mode", ["semi_async", "exact_overlap", "sync"])
def test_a_norm_in_the_records_is_that_of_the_sum_or_has_another_name(
    mode: str, optimizer: str, config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = with_pipeline(sparse(config, optimizer), mode=mode)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=1))
    train_run(config, store_path, tmp_path / "one")
    run_ranks(2, train_run, config, store_path, tmp_path / "two")
    one, two = ([record for record in metrics(tmp_path / name) if record["kind"] == "train"] for name in ("one", "two"))
    for alone, together in zip(one, two, strict=True):
        if mode != "sync" and optimizer == "adam":
            assert "grad_norm" not in together and together["grad_norm_of_parts"] > 0.0
        else:
            assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
        assert "grad_norm_of_parts" not in alone, "one rank has the whole gradient"


def train_again(config: Config, store: Path, out: Path) -> dict[str, Any]:
    return train_run(config, store, out, resume=True)


def fail_in_stage(config: Config, store: Path, out: Path, stage: str) -> tuple[str, str]:
    """Let a stage of rank 1 fail at its sixth call; return what is raised."""
    kind = SemiAsync if config.pipeline.mode == "semi_async" else ExactOverlap
    original, calls = getattr(kind, stage), []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 6 and os.environ["RANK"] == "1":
            raise OSError("disk on fire")
        return original(self, *args)

    try:
        with mock.patch.object(kind, stage, failing), mock.patch.object(machine, "gemm_peak", return_value=1e11):
            train(config, store, out)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("mode", "stage"),
    [
        *(("semi_async", stage) for stage in ("_load", "_exchange", "_wait", "_read", "_update_rows", "update")),
        *(
            ("exact_overlap", stage)
            for stage in ("_wait", "_read", "_sum_early", "_catch_up", "_update_rest", "reduce")
        ),
    ],
)
def test_a_failing_stage_of_one_rank_ends_all(
    mode: str, stage: str, config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = with_pipeline(sparse(config), mode=mode)
    (kind, message), (failed, why) = run_ranks(2, fail_in_stage, config, store_path, tmp_path / "run", stage)
    assert failed == "StageFailed" and "of step " in why and "disk on fire" in why
    assert kind == "RankLost" and "--resume" in message
    assert "disk on fire" in message, "the others say why"
