from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.data.logs import random_events
from turbogr.data.batching import Batch
from turbogr.data.loader import Loader
from turbogr.data.prepare import prepare_table
from turbogr.data.split import Split
from turbogr.data.store import Store


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
