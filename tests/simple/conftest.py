from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.stores import draw_histories, write_store
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.simple.training_events import TrainingEvents

NUM_ITEMS = 23


@pytest.fixture
def make_store(tmp_path: Any) -> Callable[..., Store]:
    """Return `write_store` with a new folder for every call."""
    numbers = itertools.count()

    def make(*args: Any, **options: Any) -> Store:
        return write_store(tmp_path / f"store-{next(numbers)}", *args, **options)

    return make


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    """A log of 150 users, with repeats, users without training events, and an item that nobody had."""
    return make_store(draw_histories(3, 150, NUM_ITEMS - 1), NUM_ITEMS)


@pytest.fixture
def split(store: Store) -> Split:
    return Split.of(store)


@pytest.fixture
def events(store: Store, split: Split) -> TrainingEvents:
    return TrainingEvents.of(store, split)


@pytest.fixture
def threads():
    """Set the number of threads; it is as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
