"""bench attention: the figures of one small real measurement."""

from __future__ import annotations

import pytest

from tests.ops.judging import needs_kernels
from turbogr.bench import attention, run_benchmark


@needs_kernels
def test_shares_of_the_peak_and_of_the_matrix_product_are_of_the_same_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "gemm_peak", lambda *_: 5e10)
    monkeypatch.setattr(attention, "fma_peak", lambda *_: 1e11)
    monkeypatch.setattr(attention, "in_child", lambda work, case: work(case))
    settings = ["lengths=[]", "share_length=40", "tokens=80", "heads=1", "share_head_dims=8", "repeats=1"]
    record, result = run_benchmark("attention", settings)
    assert record.figures.keys() == {"peak_share_8", "gemm_share_8"}
    assert 0 < record.figures["peak_share_8"] == pytest.approx(record.figures["gemm_share_8"] / 2)
    head, rate, peak, share, *_ = result.tables[-1].rows[0]
    assert (head, peak) == (8, 100.0)
    assert share == pytest.approx(float(rate) / float(peak))
