"""bench ranking: the three sides compute the same, and the figures of one small real measurement."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.judging import needs_kernels
from turbogr.bench import ranking, run_benchmark

CASE = ranking.Case("fused", 64, 3, 16, 2, 2, 5, 0.5, (40, 20, 9, 5, 30, 8, 7, 6), 1, 1)


@pytest.mark.parametrize("side", ["padded", "public"])
def test_all_sides_compute_the_same_predictions_and_gradients(side: str) -> None:
    ours, num_tokens = ranking.make_step(CASE)
    theirs, same_tokens = ranking.make_step(CASE._replace(side=side))
    assert num_tokens == same_tokens < 64 * 3
    (found, grads), (wanted, their_grads) = ours(), theirs()
    assert found.shape == (2, 15) and np.ptp(found.numpy()) > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(grads) == len(their_grads)
    for ours_here, theirs_here in zip(grads, their_grads, strict=True):
        scale = float(theirs_here.abs().max())
        np.testing.assert_allclose(ours_here, theirs_here, rtol=1e-3, atol=1e-4 * scale + 1e-7)


@needs_kernels
def test_the_record_has_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "in_child", lambda work, case: work(case))
    settings = ["lengths=[64,128]", "tokens=256", "width=16", "further_widths=[]", "candidates=5", "repeats=1"]
    settings += ["window=16", "window_lengths=[256]", "window_head_dim=16", "threads=1"]
    record, result = run_benchmark("ranking", settings)
    for length in (64, 128):
        for name in ("speedup", "memory_saving", "public_speedup", "tokens_per_second", "candidates_per_second"):
            assert f"{name}_{length}" in record.figures
    assert record.figures["window_speedup_256"] > 0
    assert len(result.tables[0].rows) == 2 and result.tables[1].rows[0][0] == 256
