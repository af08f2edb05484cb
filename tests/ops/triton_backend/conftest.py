"""Kernels in Triton's interpreter: slow, so shapes are tiny and tiles 32 x 32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from turbogr.ops import triton_runtime


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    """Interpret kernels; `tests/conftest.py` has imported them so."""
    if triton_runtime.BACKEND.problem is not None:
        pytest.skip(triton_runtime.BACKEND.problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield
