from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.data.batching import (
    batch_from_histories,
    history_batch,
    plan_batches,
    shuffled_order,
    training_batch,
    training_sequences,
)
from turbogr.data.prepare.preparation import prepare_table
from turbogr.data.split import Split
from turbogr.data.store import Store

LENGTHS = st.lists(st.integers(1, 50), max_size=60).map(lambda lengths: np.array(lengths, np.int64))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """User 0: items 0..6 at times 0, 10, ..; user 1: items 7..9 at 70, 80, 90; user 2: items 10, 11."""
    users = [0] * 7 + [1] * 3 + [2] * 2
    table = pl.DataFrame({"user_id": users, "item_id": list(range(12)), "timestamp": list(range(0, 120, 10))})
    return prepare_table(table, tmp_path / "store", split="leave-one-out")


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 70), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_token_budget_is_kept_and_every_sequence_comes_once(
    lengths: np.ndarray, budget: int, seed: int, epoch: int, shuffle: bool
) -> None:
    plan = plan_batches(lengths, batch_tokens=budget, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(np.concatenate(plan).tolist() if plan else []) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or lengths[batch].sum() <= budget
    for batch, following in itertools.pairwise(plan):
        assert lengths[batch].sum() + lengths[following[0]] > budget, "a batch was closed although one more fits"


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 9))
def test_batches_by_number_of_sequences(lengths: np.ndarray, size: int) -> None:
    plan = plan_batches(lengths, batch_size=size, seed=1)
    assert sorted(np.concatenate(plan).tolist() if plan else []) == list(range(len(lengths)))
    assert all(len(batch) == size for batch in plan[:-1])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    order = shuffled_order(1000, 3, 5)
    np.random.seed(0)  # noqa: NPY002 - the global generator must not matter
    assert np.array_equal(order, shuffled_order(1000, 3, 5))
    assert not np.array_equal(order, shuffled_order(1000, 3, 6))
    assert not np.array_equal(order, shuffled_order(1000, 4, 5))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    assert shuffled_order(5, 0, 0).tolist() == [0, 2, 3, 1, 4], "a changed shuffle breaks the resuming of old runs"


def test_impossible_plans_are_refused() -> None:
    lengths = np.ones(3, np.int64)
    with pytest.raises(ValueError, match="exactly one"):
        plan_batches(lengths)
    with pytest.raises(ValueError, match="exactly one"):
        plan_batches(lengths, batch_size=1, batch_tokens=1)
    with pytest.raises(ValueError, match="at least 1"):
        plan_batches(lengths, batch_size=0)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 12))
def test_split_windows_cover_every_input_once(counts: list[int], max_len: int) -> None:
    ends = np.cumsum(counts)
    starts = ends - counts
    sequences = training_sequences(starts, ends, max_len, "split")
    covered = [e for s, n in zip(sequences.starts, sequences.lengths, strict=True) for e in range(s, s + n)]
    assert covered == [e for start, end in zip(starts, ends, strict=True) for e in range(start, end - 1)]
    assert (sequences.lengths <= max_len).all()
    assert sequences.num_events_cut == 0
    last = training_sequences(starts, ends, max_len, "last")
    assert {(u, s) for u, s in zip(last.users, last.starts, strict=True)} <= set(
        zip(sequences.users, sequences.starts, strict=True)
    )
    assert last.num_events_cut == len(covered) - last.lengths.sum()


def test_a_training_batch_shifts_by_one(store: Store) -> None:
    split = Split.of(store)
    sequences = training_sequences(np.asarray(store.offsets[:-1]), split.train_end, 4)
    assert sequences.users.tolist() == [0, 1], "user 2 has a single training event"
    batch = training_batch(store, sequences, np.array([1, 0]))
    assert batch.users.tolist() == [1, 0]
    assert batch.items.offsets.tolist() == [0, 1, 5]
    assert batch.items.values.tolist() == [7, 1, 2, 3, 4]
    assert batch.targets is not None
    assert batch.targets.tolist() == [8, 2, 3, 4, 5]
    assert batch.events.tolist() == [7, 1, 2, 3, 4]
    assert batch.times.tolist() == [70, 10, 20, 30, 40]
    assert batch.next_times.tolist() == [80, 20, 30, 40, 50]
    assert batch.num_sequences == 2
    assert batch.num_tokens == 5
    assert batch.last_positions.tolist() == [0, 4]


def test_a_history_ends_before_the_held_out_event(store: Store) -> None:
    targets = Split.of(store).targets("test")
    batch = history_batch(store, np.array([0, 2]), targets[[0, 2]], 3)
    assert batch.items.values.tolist() == [3, 4, 5, 10]
    assert batch.next_times.tolist() == [40, 50, 60, 110]
    assert batch.targets is not None
    assert batch.targets[batch.last_positions].tolist() == [6, 11]


def test_a_request_after_the_last_event(store: Store) -> None:
    ends = np.asarray(store.offsets[1:])
    batch = history_batch(store, np.array([0, 2]), ends[[0, 2]], 2, request_times=np.array([500, 600]))
    assert batch.items.values.tolist() == [5, 6, 10, 11]
    assert batch.next_times.tolist() == [60, 500, 110, 600]
    assert batch.targets is None


def test_histories_from_outside() -> None:
    batch = batch_from_histories([[4, 5], [], [6]], [[10, 20], [], [30]], [25, 26, 40])
    assert batch.items.offsets.tolist() == [0, 2, 2, 3]
    assert batch.next_times.tolist() == [20, 25, 40]
    with pytest.raises(ValueError, match="same histories"):
        batch_from_histories([[1]], [[1, 2]], [3])
