"""bench checkpoint at a size that takes a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from turbogr.bench import run_benchmark
from turbogr.errors import UserError


def test_bench_checkpoint(tmp_path: Path) -> None:
    record, result = run_benchmark("checkpoint", ["megabytes=2", "repeats=2", f"folder={tmp_path}"])
    assert (
        0
        < record.figures["pause_share"]
        == pytest.approx(record.figures["pause_seconds"] / record.figures["blocking_seconds"])
    )
    assert record.figures["crc32_gb_per_second"] > 0
    assert record.figures["prepared_pause_share"] > 0 and record.figures["preparing_seconds"] > 0
    assert "blocking save" in result.tables[0].text()
    assert list(tmp_path.iterdir()) == []


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        run_benchmark("checkpoint", ["megabytes=0"])
