"""The arithmetic peak: measured by the fastest loop, above what any product reaches, and safe where one crashes."""

from __future__ import annotations

import ctypes

import pytest
import torch

from turbogr import machine, peak
from turbogr.errors import UserError
from turbogr.ops import bf16_unit, native


@pytest.fixture(autouse=True)
def _fresh_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    peak._measured.cache_clear()
    monkeypatch.setattr(peak, "_LOOP_SECONDS", 0.02)


def test_a_round_has_the_operations_that_its_loop_names() -> None:
    library = native.library()
    library.turbogr_fma_flops.restype = ctypes.c_int64
    assert library.turbogr_fma_flops(b"generic") == 12 * 4 * 2
    assert library.turbogr_fma_flops(b"no such loop") == 0


def test_the_peak_is_measured_once_and_threads_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    found = peak.fma_peak(torch.float32, threads=1)
    assert 1e9 < found < 1e12 and torch.get_num_threads() == before
    monkeypatch.setattr(peak, "_rate", lambda *args: 0.0)
    assert peak.fma_peak(torch.float32, threads=1) == found


def test_a_burst_that_was_disturbed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million rounds a second, but the first call waits for the other threads to start."""
    clock = [0.0]

    class Library:
        def turbogr_fma_flops(self, name: bytes) -> int:
            return 2

        def turbogr_fma_run(self, name: bytes, rounds: ctypes.c_int64, threads: ctypes.c_int64) -> None:
            clock[0] += 0.02 if clock[0] == 0.0 else 50e-6 + rounds.value * 1e-6

    monkeypatch.setattr(peak.time, "perf_counter", lambda: clock[0])
    assert peak._rate(Library(), "generic", 1) == pytest.approx(2e6, rel=0.02)  # type: ignore[arg-type]


def test_the_fastest_loop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_fault", lambda library, loop, dtype: "too old" if loop == "avx512" else None)
    monkeypatch.setattr(peak, "_rate", lambda library, loop, threads: {"avx2": 3.0, "generic": 2.0}[loop])
    assert peak.fma_peak() == 3.0


def test_a_loop_that_crashes_is_left_out_and_does_not_crash_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_LOOPS", {torch.bfloat16: ("generic",)})
    monkeypatch.setattr(bf16_unit, "loop_fault", lambda loop: "it crashed with SIGILL")
    with pytest.raises(peak.PeakUnavailable, match="generic: it crashed with SIGILL"):
        peak.fma_peak(torch.bfloat16)


def test_a_loop_that_works_in_the_child_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_LOOPS", {torch.bfloat16: ("generic",)})
    assert peak.fma_peak(torch.bfloat16, threads=1) > 1e9


def test_a_precision_without_a_loop_says_so() -> None:
    with pytest.raises(peak.PeakUnavailable, match="float16"):
        peak.fma_peak(torch.float16)


def test_without_compiled_kernels_the_product_is_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UserError("the C++ kernels are not built")

    monkeypatch.setattr(native, "library", missing)
    monkeypatch.setattr(machine, "gemm_peak", lambda *args: 5e10)
    with pytest.raises(peak.PeakUnavailable, match="not built"):
        peak.fma_peak()
    assert peak.measure_peak() == peak.Peak(None, 5e10) and peak.measure_peak().flops == 5e10


def test_the_peak_of_several_processes_is_their_sum() -> None:
    both = peak.Peak.of_all([peak.Peak(3.0, 2.0), peak.Peak(3.0, 1.0)])
    assert both == peak.Peak(6.0, 3.0) and both.flops == 6.0
    assert peak.Peak.of_all([peak.Peak(None, 2.0), peak.Peak(3.0, 2.0)]) == peak.Peak(None, 4.0)
    assert peak.Peak.of_all([None, both]) is None
    assert peak.peak_facts(both) == {"peak_flops": 6.0, "fma_peak_flops": 6.0, "gemm_peak_flops": 3.0}
    assert peak.Peak(2.0, 3.0).flops == 3.0  # a library with an instruction that our loops have not
