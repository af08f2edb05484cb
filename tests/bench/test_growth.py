"""bench growth: what arithmetic predicts, which step counts as a jump, and one real measurement at small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from turbogr.bench import growth, run_benchmark
from turbogr.bench._training import Case, measure_in_child
from turbogr.bench.growth import (
    Point,
    cache_bytes,
    found_jumps,
    predict_from_growth,
    predict_from_one_rate,
    touched_rows,
)
from turbogr.errors import UserError


def test_one_rate_fits_work_that_costs_what_it_should() -> None:
    points = predict_from_one_rate([1, 2, 4], [3.0, 6.0, 12.0], [30.0, 60.0, 120.0])
    assert [point.ratio for point in points] == pytest.approx([1, 1, 1])
    points = predict_from_one_rate([1, 2], [1.0, 4.0], [1.0, 1.0])
    assert [point.ratio for point in points] == pytest.approx([0.5, 2])


def test_growth_keeps_the_first_and_fits_the_rest() -> None:
    points = predict_from_growth([10, 20, 30], [5.0, 7.0, 9.0], [1.0, 2.0, 3.0])
    assert [point.predicted for point in points] == pytest.approx([5, 7, 9])
    points = predict_from_growth([10, 20], [5.0, 4.0], [1.0, 2.0])
    assert [point.predicted for point in points] == [5.0, 5.0]


def test_touched_rows_are_those_that_sampling_gives() -> None:
    drawn = torch.randint(0, 1000, (2000,), generator=torch.Generator().manual_seed(0))
    assert touched_rows(1000, 2000) == pytest.approx(len(drawn.unique()), rel=0.03)
    assert touched_rows(1, 5) == 1
    assert touched_rows(10**9, 100) == pytest.approx(100, rel=1e-6)


def test_a_jump_against_the_prediction_is_found() -> None:
    points = [Point(1, 1.0, 1.0), Point(2, 1.1, 1.0), Point(3, 4.0, 2.0)]
    (found,) = found_jumps("length", points)
    assert "between 2 and 3" in found
    (none,) = found_jumps("length", points[:2])
    assert "no jump from 1 to 2" in none


def test_cache_sizes_are_read(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate([(1, "Data", "32K"), (2, "Instruction", "9K"), (2, "Unified", "2M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    assert cache_bytes(2, tmp_path) == 2 * 2**20
    assert cache_bytes(3, tmp_path) is None


def test_figures_plots_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(case: Case) -> dict[str, float]:
        per_token = case.model["max_len"] * (3.0 if case.num_items == 400 else 1.0)
        return {"tokens_per_second": 1 / per_token, "strict_flops_per_second": 7.0}

    monkeypatch.setattr(growth, "measure_in_child", measured)
    record, result = run_benchmark("growth", ["lengths=32,16", "items=200,400"])
    assert record.figures["length_32_us_per_token"] == pytest.approx(32e6)
    assert record.figures["length_16_vs_predicted"] == pytest.approx(1)
    assert record.figures["length_largest_jump"] == pytest.approx(1)
    assert record.figures["items_400_us_per_token"] == pytest.approx(3 * 256e6)
    assert set(result.plots) == {"length", "items"}
    assert any("no jump from 16 to 32" in note for note in result.notes)


def test_a_case_is_measured_in_a_process_of_its_own() -> None:
    model = {"dim": 16, "num_blocks": 1, "num_heads": 1, "max_len": 16, "dropout": 0.2}
    measured = measure_in_child(
        Case(
            model, num_items=50, batch_size=4, median_length=16, sigma=0.0, num_negatives=4, seconds=0.05, profile=True
        )
    )
    assert measured["tokens_per_step"] == 64
    assert measured["tokens_per_second"] > 0 and measured["strict_flops_per_second"] > 0
    assert len(measured["profile"]) > 5 and "between operators" in measured["profile"]


def test_settings_that_show_nothing() -> None:
    with pytest.raises(UserError, match="at least two"):
        run_benchmark("growth", ["lengths=100"])
    with pytest.raises(UserError, match="does not fit"):
        run_benchmark("growth", ["lengths=100,70000"])
