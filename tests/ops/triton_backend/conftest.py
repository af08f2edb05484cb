"""Kernels in Triton's interpreter: slow, so shapes are tiny and tiles 32 x 32."""

from __future__ import annotations

import pytest

from turbogr.ops import triton_runtime


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret kernels; `tests/conftest.py` has imported them so."""
    if triton_runtime.BACKEND.problem is not None:
        pytest.skip(triton_runtime.BACKEND.problem)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
