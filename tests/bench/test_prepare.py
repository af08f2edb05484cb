from __future__ import annotations

from pathlib import Path

import pytest

from turbogr.bench import run_benchmark
from turbogr.errors import UserError


def test_small_logs_are_measured_with_every_implementation(tmp_path: Path) -> None:
    sizes = ["events=20000,40000", "num_items=500", "reference_events=20000", "fixed_users=10", "fixed_items=50"]
    settings = [*sizes, f"folder={tmp_path}"]
    record, result = run_benchmark("prepare", settings)
    for key in ("events_per_second_20000", "peak_memory_bytes_40000", "polars_events_per_second_20000"):
        assert record.figures[key] > 0
    assert "polars_events_per_second_40000" not in record.figures
    assert 50e6 < record.figures["peak_memory_bytes_20000"] < 2e9
    assert record.figures["distinct_ids_fixed_ids_20000"] == record.figures["distinct_ids_fixed_ids_40000"] == 60
    assert record.figures["peak_memory_bytes_fixed_ids_40000"] > 50e6
    assert len(result.tables[0].rows) >= 5
    assert list(tmp_path.iterdir()) == []


def test_impossible_settings() -> None:
    with pytest.raises(UserError, match="num-items must be at least 2, but it is 1"):
        run_benchmark("prepare", ["num_items=1"])
