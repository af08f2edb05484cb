from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.conftest import config, write_store

__all__ = ["config"]


@pytest.fixture(scope="package")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "store").path
