"""bench negatives: all implementations compute the same loss, and the figures are the worst over the lengths."""

from __future__ import annotations

import pytest
import torch

from turbogr.bench import negatives, run_benchmark
from turbogr.bench._negatives import PLAIN, WAYS, Case, Measured, prepare, shared
from turbogr.errors import UserError

CASE = Case(PLAIN, 12, length=9, num_tokens=27, num_items=40, dim=8, repeats=1, threads=1)


@pytest.mark.parametrize("way", ["fused", "segments"])
def test_plain_gather_is_the_same_loss(way: str) -> None:
    plain_loss, plain_queries, plain_rows = prepare(CASE)()
    loss, queries, rows, ids = prepare(CASE._replace(way=way))()
    torch.testing.assert_close(loss, plain_loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(queries, plain_queries, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(rows, plain_rows.to_dense()[ids], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("way", WAYS)
def test_every_implementation_has_as_many_effective_negatives(way: str) -> None:
    for count in (2, 32, 128, 1024):
        assert WAYS[way](count).num_scored == count
    loss, *_ = prepare(CASE._replace(way=way))()
    assert loss.isfinite().all()


def test_sixty_four_negatives_are_drawn() -> None:
    assert shared(1024) == {"num_negatives": 64, "expansion": 16}
    assert shared(32) == {"num_negatives": 16, "expansion": 2}


def test_figures_are_the_worst_over_the_lengths() -> None:
    found = {
        (PLAIN, 128, 1): Measured(4.0, 1000),
        ("all together", 128, 1): Measured(2.0, 100),
        ("shared", 128, 1): Measured(1.0, 300),
        (PLAIN, 128, 2): Measured(3.0, 1000),
        ("all together", 128, 2): Measured(3.0, 200),
        ("shared", 128, 2): Measured(1.5, 300),
        ("shared", 1024, 2): Measured(1.5, 300),
    }
    assert negatives.figures([128, 1024], [1, 2], found, {1: 2.0, 2: 1.0}) == {
        "memory_saving_128": 0.8,
        "step_ratio_128": 1.0,
        "speedup_128": 2.0,
    }


def test_it_runs_and_records() -> None:
    settings = ["negatives=8", "lengths=6", "tokens=12", "items=30", "dim=8", f"ways=['{PLAIN}', shared, all together]"]
    record, result = run_benchmark("negatives", [*settings, "repeats=1", "threads=1"])
    rounding = {"kernel_rounding_ms", "kernel_rounding_mib", "shadow_ms", "shadow_mib"}
    assert set(record.figures) == {"memory_saving_8", "step_ratio_8", "speedup_8", *rounding}
    assert len(result.tables) == 2 and len(result.tables[0].rows) == 3
    # Rows of the catalogue, all of which are drawn, in fp16: a copy of them, and with a shadow twice.
    assert record.figures["shadow_mib"] > record.figures["kernel_rounding_mib"] > 0
    assert set(result.plots) == {"time", "memory"}


def test_what_does_not_fit_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negatives, "memory_bytes", lambda: 2**20)
    assert "left out" in (negatives._too_large(1024, 200, negatives.SETTINGS) or "")
    assert negatives._too_large(1, 2, {"tokens": 2, "dim": 4}) is None


@pytest.mark.parametrize(
    ("setting", "message"), [("ways=[fusd]", "unknown 'fusd'"), ("negatives=1,8", "1 cannot be shared")]
)
def test_bad_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_benchmark("negatives", [setting])
