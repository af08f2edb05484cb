from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def real_data() -> Path:
    """The folder with the public data sets, named by TURBOGR_TEST_DATA."""
    folder = os.environ.get("TURBOGR_TEST_DATA")
    if not folder:
        pytest.skip("TURBOGR_TEST_DATA does not name the folder with the public data sets")
    return Path(folder)
