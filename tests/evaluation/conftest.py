from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.stores import write_store
from turbogr.data.store import Store


@pytest.fixture
def make_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Store]:
    """Return `write_store` with a new folder for every call."""
    folder = tmp_path_factory.mktemp("stores")
    numbers = itertools.count()

    def make(*args: Any, **options: Any) -> Store:
        return write_store(folder / f"store-{next(numbers)}", *args, **options)

    return make
