"""bench full_softmax: both sides compute the same, and the figures compare them."""

from __future__ import annotations

import pytest
import torch

from turbogr.bench import full_softmax, run_benchmark
from turbogr.bench.full_softmax import PLAIN, TILES, Case, Measured, prepare


def test_both_sides_compute_the_same() -> None:
    plain, tiles = (prepare(Case(side, 50, 8, 20, 1))() for side in (PLAIN, TILES))
    for one, other in zip(plain, tiles, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_figures_compare_what_was_measured_on_both_sides() -> None:
    found = {
        (10, 4, PLAIN): Measured(6.0, 1000),
        (10, 4, TILES): Measured(2.0, 50),
        (99, 4, TILES): Measured(2.0, 50),
    }
    assert full_softmax.figures(found) == {"speedup_10_4": 3.0, "memory_saving_10_4": 0.95}


def test_it_runs_and_records() -> None:
    record, result = run_benchmark(
        "full_softmax", ["items=[30, 40]", "dims=8", "positions=12", "repeats=1", "threads=1"]
    )
    assert set(record.figures) == {f"{kind}_{n}_8" for kind in ("speedup", "memory_saving") for n in (30, 40)}
    assert len(result.tables[0].rows) == 4 and not result.notes


def test_plain_pytorch_is_left_out_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_softmax, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(full_softmax, "measure_in_child", lambda case: Measured(1.0, 1))
    result = full_softmax.run({"items": [30], "dims": [8, 16], "positions": 12, "repeats": 1, "threads": 1})
    assert result.figures == {} and len(result.tables[0].rows) == 2
    assert len(result.notes) == 1 and "30 items" in result.notes[0]
