"""A bad step of one rank is left out on all of them, in every mode, and the message names that rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.test_pipeline import MODES
from tests.parallel.training import make_trainer, train_run, whole_state
from tests.training.test_bad_steps import with_policy
from tests.training.test_pipeline import sparse, train_by_definition, train_epochs, with_pipeline
from tests.training.test_run import final_tensors, metrics
from turbogr.chaos.bad_values import bad_values
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.parallel.world import connected_world

BAD_STEPS = {5, 6, 13}


def train_with_infinite_gradients(config: Config, store: Path, run: Path, groups: int) -> dict[str, Any]:
    """Train an epoch in every mode with gradients of rank 1 that are not finite, and by the definition of the modes.

    Return the states, by mode and what is not finite.
    """
    results = {}
    with connected_world() as world:
        for mode in ("sync", "semi_async", "exact_overlap"):
            trainer = make_trainer(with_pipeline(config, **MODES[mode]), store, run, world, groups)
            train_by_definition(trainer, MODES[mode].get("staleness", 0), epochs=1, left_out=BAD_STEPS)
            results[mode, "left out"] = _arrays(trainer)
            for kind in ("dense", "rows"):
                trainer = make_trainer(with_pipeline(config, **MODES[mode]), store, run, world, groups)
                with bad_values(kind, BAD_STEPS, rank=1):
                    train_epochs(trainer, 1)
                assert trainer.progress.skipped_steps == [6, 7, 14]
                results[mode, kind] = _arrays(trainer)
                bad, _ = trainer._bad_steps[0]
                what = "position" if kind == "dense" else "rows of the table item"
                assert str(bad) == f"the gradient of {what} on rank 1 is not finite at step 6", str(bad)
    return results


def _arrays(trainer: Any) -> dict[str, Any]:
    trainer.executor.past_weights = list  # of batches in flight, which there are none of after an epoch
    return {name: tensor.numpy() for name, tensor in whole_state(trainer).items()}


@pytest.mark.parametrize(("groups", "optimizer"), [(1, "adam"), (2, "adagrad clipped")])
def test_a_gradient_only_infinity_of_one_rank_is_left_out_on_all_in_every_mode(
    groups: int, optimizer: str, config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = with_policy(sparse(config, optimizer), "skip")
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, check_every=1))
    for states in run_ranks(2, train_with_infinite_gradients, config, store_path, tmp_path, groups):
        assert len(states) == 9
        for (mode, kind), state in states.items():
            defined = states[mode, "left out"]
            assert state.keys() == defined.keys()
            for name, array in state.items():
                assert np.isfinite(array).all() and np.array_equal(array, defined[name]), (mode, kind, name)


def train_with_bad_values(config: Config, store: Path, out: Path) -> dict[str, Any]:
    with bad_values("dense", {2, 9}, rank=1):
        return train_run(config, store, out)


def test_ranks_go_back_together(config: Config, store_path: Path, tmp_path: Path) -> None:
    config = with_pipeline(sparse(config), mode="semi_async")
    ends = {}
    for policy in ("skip", "rewind"):
        config = with_policy(config, policy, checkpoint_every=4, epochs=1)
        ends[policy] = run_ranks(2, train_with_bad_values, config, store_path, tmp_path / policy)
    assert ends["skip"] == ends["rewind"] and ends["skip"][0]["status"] == "finished"
    ours, theirs = (final_tensors(config, Store.open(store_path), tmp_path / name) for name in ends)
    for name, tensor in ours.items():
        assert np.array_equal(tensor.numpy(), theirs[name].numpy()), name
    bad = [(r["step"], r["ranks"]) for r in metrics(tmp_path / "rewind") if r["kind"] == "bad_step"]
    assert bad == [(3, [1]), (10, [1])]
