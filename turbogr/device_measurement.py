"""Time, memory and the rate of matrix products on any device, measured where the work is done.

On a device with streams, times are those of its own events: they do not contain what the host does in between. Rates
of matrix products are what the device's library reaches, in each precision; no loop of our own finds the peak of its
arithmetic, so utilisation on an accelerator is a share of the library's rate and says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from turbogr.streams import has_streams

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")

_GEMM_SIZES = (512, 1024, 2048, 4096, 8192)
_GEMM_SECONDS = 0.3  # measured per size
_LONGEST_PRODUCT = 0.1  # seconds; larger sizes are left out beyond that


def synchronize(device: torch.device) -> None:
    """Wait until all work on a device is done."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def device_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median time of calls of `work` on a device, in seconds, after one that is not counted."""
    work()
    synchronize(device)
    return statistics.median(_seconds(work, device) for _ in range(repeats))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if not has_streams(device):
        started = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - started
    before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3  # type: ignore[no-any-return, attr-defined]


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on."""
    if device.type not in ("cpu", "meta", "mps"):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes of a device that tensors of this process have held; None where it is not counted."""
    if device.type in ("cpu", "meta", "mps"):
        return None
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def set_product_precision(precision: str, device: torch.device) -> None:
    """Let products of fp32 matrices be in TF32 from now on if a run's precision says so, on accelerators that have it.

    On a CPU they stay in fp32: what PyTorch does there with this setting depends on the processor.
    """
    is_narrow = precision == "tf32" and device.type != "cpu"
    torch.set_float32_matmul_precision("high" if is_narrow else "highest")


@contextmanager
def products_in(precision: str, device: torch.device) -> Iterator[None]:
    """Compute products of fp32 matrices in the block as `set_product_precision` says."""
    before = torch.get_float32_matmul_precision()
    set_product_precision(precision, device)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_gemm_peak(device: torch.device, precision: Precision = "fp32") -> float:
    """Return the best rate of several large square matrix products of the device's library, in FLOP/s."""
    dtype, best = torch.bfloat16 if precision == "bf16" else torch.float32, 0.0
    with products_in(precision, device):
        for size in _GEMM_SIZES:
            left = torch.full((size, size), 0.5, dtype=dtype, device=device)
            right = torch.full((size, size), 0.25, dtype=dtype, device=device)
            out = torch.empty((size, size), dtype=dtype, device=device)
            seconds = _shortest(lambda left=left, right=right, out=out: torch.mm(left, right, out=out), device)  # type: ignore[misc]
            best = max(best, 2.0 * size**3 / seconds)
            if 8 * seconds > _LONGEST_PRODUCT:
                break
    return best


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of a call, of as many as fit into a part of a second."""
    work()
    synchronize(device)
    shortest, end = float("inf"), time.perf_counter() + _GEMM_SECONDS
    while shortest == float("inf") or time.perf_counter() < end:
        shortest = min(shortest, _seconds(work, device))
    return shortest
