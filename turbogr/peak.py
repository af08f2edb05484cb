"""The arithmetic peak of the processor, the 100 % of MFU: fused multiply-adds that touch no memory.

The rate of the library's matrix product (`machine.gemm_peak`) stands beside it. It used to be the 100 %, and is a third
of what some processors can do. Loops for bf16 run in a child process first: some virtual machines announce
instructions that crash with SIGILL.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from turbogr import machine
from turbogr.errors import UserError
from turbogr.ops import bf16_unit, native
from turbogr.ops.registry import dtype_name

# By precision, the loops of csrc/fma_peak.cpp. The fastest counts, which is not always the widest.
_LOOPS = {torch.float32: ("avx512", "avx2", "generic"), torch.bfloat16: ("amx_bf16", "avx512_bf16")}
_IN_PROCESS = (torch.float32,)

_BURST_SECONDS = 0.004  # long enough for the threads to start together, and so short that some burst is undisturbed
_LOOP_SECONDS = 0.15


class PeakUnavailable(RuntimeError):
    """The arithmetic peak of a precision cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Peak:
    """What a processor computes at most, in FLOP/s, in one precision and with one number of threads.

    `fma`: the best loop of fused multiply-adds; None if there is none for this precision, or no compiled kernels.
    `gemm`: the best matrix product of PyTorch's library.
    """

    fma: float | None
    gemm: float

    @property
    def flops(self) -> float:
        """The 100 % of MFU. A library that is faster than our loops has an instruction that they have not."""
        return max(self.fma or 0.0, self.gemm)

    @classmethod
    def of_all(cls, peaks: Sequence[Peak | None]) -> Peak | None:
        """That of several processes together; None if one has none."""
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(peaks):
            return None
        fma = [peak.fma for peak in known if peak.fma is not None]
        return cls(sum(fma) if len(fma) == len(known) else None, sum(peak.gemm for peak in known))


def peak_facts(peak: Peak | None) -> dict[str, float | None]:
    """What environment.json says of a run's peak.

    `peak_flops` is the 100 % of its MFU. Runs of before that was measured have `gemm_peak_flops` alone, and their MFU
    is a share of that.
    """
    if peak is None:
        return {"peak_flops": None, "fma_peak_flops": None, "gemm_peak_flops": None}
    return {"peak_flops": peak.flops, "fma_peak_flops": peak.fma, "gemm_peak_flops": peak.gemm}


def measure_peak(dtype: torch.dtype = torch.float32, threads: int | None = None) -> Peak:
    """Measure both rates.

    Raises:
        GemmUnavailable: this machine cannot multiply matrices of that precision.
    """
    try:
        fma = fma_peak(dtype, threads)
    except PeakUnavailable:
        fma = None
    return Peak(fma, machine.gemm_peak(dtype, threads))


def fma_peak(dtype: torch.dtype = torch.float32, threads: int | None = None) -> float:
    """Return the rate, in FLOP/s, of fused multiply-adds with `threads` threads (None: as many as torch uses).

    It is measured once per process in the best instruction set of the processor, whichever the kernels use.

    Raises:
        PeakUnavailable: no compiled kernels, or no instruction of that precision that works here.
    """
    return _measured(dtype, threads or torch.get_num_threads())


@functools.cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    name = dtype_name(dtype)
    if dtype not in _LOOPS:
        raise PeakUnavailable(f"there is no loop of fused multiply-adds for {name}")
    try:
        library = native.library()
    except UserError as error:
        raise PeakUnavailable(str(error)) from None
    if not hasattr(library, "turbogr_fma_flops"):
        raise PeakUnavailable(f"{native.PATH} was built from older sources; install turbogr again")
    library.turbogr_fma_flops.restype = ctypes.c_int64
    faults = {loop: fault for loop in _LOOPS[dtype] if (fault := _fault(library, loop, dtype)) is not None}
    usable = [loop for loop in _LOOPS[dtype] if loop not in faults]
    if not usable:
        reasons = "; ".join(f"{loop}: {fault}" for loop, fault in faults.items())
        raise PeakUnavailable(f"no instruction for {name} works here ({reasons})")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_rate(library, loop, threads) for loop in usable)
    finally:
        torch.set_num_threads(before)


def _fault(library: ctypes.CDLL, loop: str, dtype: torch.dtype) -> str | None:
    """Why a loop cannot run here, None if it can."""
    if dtype not in _IN_PROCESS:
        return bf16_unit.loop_fault(loop)
    return None if library.turbogr_fma_flops(loop.encode()) else "this processor does not have it"


def _rate(library: ctypes.CDLL, loop: str, threads: int) -> float:
    """The best rate of several bursts: others that use the processor can only slow one down."""
    name = loop.encode()
    flops = threads * library.turbogr_fma_flops(name)

    def seconds(rounds: int) -> float:
        start = time.perf_counter()
        library.turbogr_fma_run(name, ctypes.c_int64(rounds), ctypes.c_int64(threads))
        return time.perf_counter() - start

    # The shortest of several bursts: one that was disturbed would end the search at a burst of microseconds.
    rounds = 1000
    while min(seconds(rounds) for _ in range(5)) < _BURST_SECONDS:
        rounds *= 2
    best, end = 0.0, time.perf_counter() + _LOOP_SECONDS
    while best == 0.0 or time.perf_counter() < end:
        best = max(best, flops * rounds / seconds(rounds))
    return best
