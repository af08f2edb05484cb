from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.data.logs import random_events
from turbogr.data.batching import Batch
from turbogr.data.loader import Loader
from turbogr.data.prepare.preparation import prepare_table
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    import polars as pl

    table = pl.DataFrame(random_events(800, 40, 30, seed=1), schema=["user_id", "item_id", "timestamp"], orient="row")
    return prepare_table(table, tmp_path_factory.mktemp("loader") / "store", split="leave-one-out")


def make(store: Store, **options: object) -> Loader:
    return Loader(store, Split.of(store), **{"max_len": 8, "batch_tokens": 40, **options})  # type: ignore[arg-type]


def names(batches: list[Batch]) -> list[list[int]]:
    return [batch.events.tolist() for batch in batches]


def test_an_epoch_holds_every_training_input_once(store: Store) -> None:
    loader = make(store, window="split")
    events = [event for batch in loader for event in batch.events.tolist()]
    split = Split.of(store)
    inputs = [e for u in range(store.num_users) for e in range(store.offsets[u], split.train_end[u] - 1)]
    assert sorted(events) == inputs
    assert loader.num_events_cut == 0
    assert loader.num_tokens == len(inputs)


def test_what_the_last_window_cuts_off_is_counted(store: Store) -> None:
    loader = make(store)
    assert loader.num_events_cut == make(store, window="split").num_tokens - loader.num_tokens > 0


def test_iterating_equals_asking_for_batches(store: Store) -> None:
    loader = make(store)
    for epoch in range(2):
        assert names(list(loader)) == names([loader.batch(epoch, k) for k in range(loader.num_batches(epoch))])
    assert names([make(store).batch(0, 0)]) != names([make(store).batch(1, 0)])


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_saved_position_continues_without_repeating_or_skipping(store: Store, stop: int) -> None:
    straight = make(store)
    expected = names([*straight, *straight])
    loader, seen = make(store), []
    state = loader.state_dict()
    for step, batch in enumerate(loader):
        if step == stop:
            break
        seen.append(batch)
        state = loader.state_dict()
    resumed = make(store)
    resumed.load_state_dict(state)
    assert names([*seen, *resumed, *resumed]) == expected


def test_the_end_of_an_epoch_is_the_start_of_the_next(store: Store) -> None:
    loader = make(store)
    for _ in loader:
        state = loader.state_dict()
    assert state == {"epoch": 1, "step": 0} == loader.state_dict()


def test_leaving_early_stops_the_reader(store: Store) -> None:
    before = threading.active_count()
    iterator = iter(make(store))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_unshuffled_batches_follow_the_store(store: Store) -> None:
    users = np.concatenate([batch.users.numpy() for batch in make(store, shuffle=False)])
    assert (np.diff(users) > 0).all()


@pytest.mark.parametrize("balance", ["auto", "none", "token-budget", "reallocate"])
def test_ranks_share_the_batches_of_one_rank(store: Store, balance: str) -> None:
    alone = make(store, batch_tokens=60)
    ranks = [make(store, batch_tokens=60, balance=balance, rank=rank, num_ranks=3) for rank in range(3)]
    for batch, *parts in zip(alone, *ranks, strict=True):
        assert sorted(event for part in parts for event in part.events.tolist()) == sorted(batch.events.tolist())
        for part in parts:
            assert part.lengths_of_step.tolist() == batch.items.lengths.tolist()


def test_ranks_are_balanced_by_the_cost_and_speeds_given(store: Store) -> None:
    def loads(**options: object) -> np.ndarray:
        ranks = [make(store, max_len=40, batch_tokens=200, rank=r, num_ranks=2, **options) for r in range(2)]
        return np.array([[part.num_tokens for part in parts] for parts in zip(*ranks, strict=True)])

    naive, even, tilted = loads(balance="none"), loads(balance="reallocate"), loads(speeds=[3.0, 1.0])
    assert np.ptp(even, axis=1).sum() < 0.5 * np.ptp(naive, axis=1).sum()
    assert tilted[:, 0].sum() == pytest.approx(3 * tilted[:, 1].sum(), rel=0.2)


def test_speeds_must_be_given_for_every_rank(store: Store) -> None:
    with pytest.raises(UserError, match=r"parallel\.speeds has 2 numbers for 3 ranks"):
        make(store, num_ranks=3, speeds=[1.0, 2.0])
    assert make(store, speeds=[1.0, 2.0]).num_batches(0) > 0, "without effect on one rank"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_knows_the_targets_of_the_step(num_ranks: int, store: Store) -> None:
    whole = make(store).batch(0, 1)
    for rank in range(num_ranks):
        part = make(store, rank=rank, num_ranks=num_ranks, with_step_targets=True).batch(0, 1)
        assert torch.equal(part.targets_of_step, whole.targets_of_step)
        assert make(store, rank=rank, num_ranks=num_ranks).batch(0, 1).step_targets is None


def planned(store: Store, **options: object) -> Loader:
    plan = {"batch_size": 6, "plan_ranks": 2, "plan_window": 4}
    return make(store, batch_tokens=None, max_len=16, window="split", **plan, **options)


def test_planned_steps_hold_every_input_once_and_are_resumed_exactly(store: Store) -> None:
    straight = planned(store)
    assert not straight.plan_is_refused
    expected = names([*straight, *straight])
    assert names(list(planned(store))) != names(list(make(store, batch_tokens=None, batch_size=6, max_len=16)))
    epoch = [event for batch in planned(store) for event in batch.events.tolist()]
    assert sorted(epoch) == sorted(event for batch in make(store, window="split") for event in batch.events.tolist())
    for stop in (1, 7):
        loader, seen = planned(store), []
        for batch in loader:
            seen.append(batch)
            if len(seen) == stop:
                break
        resumed = planned(store)
        resumed.load_state_dict(loader.state_dict())
        assert names([*seen, *resumed, *resumed]) == expected


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_planned_steps_are_the_same_on_any_number_of_ranks(store: Store, num_ranks: int) -> None:
    alone = planned(store)
    ranks = [planned(store, rank=rank, num_ranks=num_ranks, balance="reallocate") for rank in range(num_ranks)]
    for step in range(alone.num_batches(1)):
        shares = [event for loader in ranks for event in loader.batch(1, step).events.tolist()]
        assert sorted(shares) == sorted(alone.batch(1, step).events.tolist())
