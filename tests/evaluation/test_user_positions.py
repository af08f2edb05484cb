from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.stores import draw_histories
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.evaluation.metrics import MISSED
from turbogr.evaluation.user_positions import Measured, UserPositions, file_of


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store(draw_histories(3, 40, 30, shortest=2), 30)


def positions_of(store: Store, split: Split) -> np.ndarray:
    positions = np.arange(1, 1 + int((split.test >= 0).sum()), dtype=np.int64)
    positions[::5] = MISSED
    return positions


def test_positions_are_read_as_they_were_written(store: Store, tmp_path: Path) -> None:
    split = Split.of(store)
    positions = positions_of(store, split)
    measured = {"model": Measured({}, {}, positions), "ease": Measured({}, {}, positions[::-1]), "rule": Measured({})}
    by_user = UserPositions.of(store, split, "test", 12, measured)
    assert by_user is not None
    assert by_user.write(tmp_path) == file_of(tmp_path, "test", 12)
    read = UserPositions.read(tmp_path, "test", 12)
    assert read is not None and list(read.positions) == ["model", "ease"]
    assert np.array_equal(read.positions["model"], positions)
    assert np.array_equal(read.positions["ease"], positions[::-1])
    assert UserPositions.read(tmp_path, "valid", 12) is None and UserPositions.read(tmp_path, "test", 13) is None


def test_what_is_stored_of_users_and_items_is_that_of_the_store(store: Store) -> None:
    split = Split.of(store)
    by_user = UserPositions.of(store, split, "test", 1, {"model": Measured({}, {}, positions_of(store, split))})
    assert by_user is not None
    train_counts = np.zeros(store.num_items, int)
    for user in range(store.num_users):
        np.add.at(train_counts, store.items[store.offsets[user] : split.train_end[user]], 1)
    for place, user in enumerate(by_user.users):
        event = split.test[user]
        assert by_user.history_lengths[place] == event - store.offsets[user]
        assert by_user.target_counts[place] == train_counts[store.items[event]]


def test_a_task_without_positions_has_none_to_store(store: Store) -> None:
    assert UserPositions.of(store, Split.of(store), "test", 1, {"model": Measured({"auc": 0.5})}) is None


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: b"", lambda data: b"no zip"])
def test_a_damaged_file_is_no_file(store: Store, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    split = Split.of(store)
    by_user = UserPositions.of(store, split, "test", 1, {"model": Measured({}, {}, positions_of(store, split))})
    assert by_user is not None
    path = by_user.write(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert UserPositions.read(tmp_path, "test", 1) is None
