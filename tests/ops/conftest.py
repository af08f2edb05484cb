"""Fixtures of the operators' tests."""

from __future__ import annotations

import pytest

from turbogr.ops.jagged_attention import cpu_relative


@pytest.fixture(params=["small blocks", "large blocks"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on blocks of one size, whatever the length."""
    monkeypatch.setattr(cpu_relative, "SMALL_BLOCKS_UP_TO", 2**62 if request.param == "small blocks" else 0)
