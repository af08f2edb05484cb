"""Facts about this machine, saved with every measured figure, and the rate of PyTorch's matrix product.

Precisions below fp32 are always tried in a child process first: some virtual machines advertise AMX but hide CPUID leaf
0x1D, and there PyTorch's bf16 matmul crashes with SIGILL. Imports only torch and the standard library.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import turbogr

PACKAGES = ("torch", "numpy", "pyarrow", "polars")

# The instruction sets that decide which kernels run, oldest first; names as in Linux's /proc/cpuinfo.
ISA_FLAGS = (
    "sse4_2",
    "avx",
    "f16c",
    "fma",
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "sve",
)

_GEMM_SIZES = (256, 768, 1536)
_GEMM_SECONDS = 0.15  # measured per size; at least one product after the warm-up
_IN_PROCESS = (torch.float32, torch.float64)

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
from turbogr.machine import _measure_gemm
print(json.dumps(_measure_gemm(getattr(torch, sys.argv[2]), int(sys.argv[3]))))
"""

# Small, square and thin products use different kernels.
_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
for rows, size in ((1, 64), (64, 64), (7, 512), (512, 512)):
    left = torch.ones(rows, size, dtype=getattr(torch, sys.argv[2]))
    torch.mm(left, torch.ones(size, size, dtype=left.dtype))
"""


class GemmUnavailable(RuntimeError):
    """This machine cannot multiply matrices in a precision; the message says why."""


def machine_facts() -> dict[str, Any]:
    """Return the facts of the machine and process as plain JSON values.

    `cores`: cores that this process may use. `threads`: threads that torch uses. `memory_bytes`: physical memory, or
    the container's limit. `isa`: which of `ISA_FLAGS` the processor has.
    """
    flags = _cpu_flags()
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    found = {"turbogr": turbogr.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def usable_cores() -> int:
    """Return the number of logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory that this process may use: physical, or the control group's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(limit_file).strip()
        if limit.isdigit():
            return min(physical, int(limit))
    return physical


def available_memory() -> int | None:
    """Return the memory that this process may still take without swapping, None where the system does not say it."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    if found is None:
        return None
    available = int(found[1]) * 1024
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return max(0, min(available, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else available


def device_memory(device: torch.device) -> int:
    """Return the memory of an accelerator in bytes, 0 if its driver does not report it."""
    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except (RuntimeError, AttributeError, NotImplementedError):
        return 0


def gemm_peak(dtype: torch.dtype = torch.float32, threads: int | None = None, timeout: float = 60.0) -> float:
    """Return the best rate, in FLOP/s, of several large square matrix products on the CPU with `threads` threads.

    fp32 and fp64 are measured in this process, every other precision in a child process.

    Raises:
        GemmUnavailable: this machine cannot multiply matrices of that precision, or not within `timeout` seconds.
    """
    threads = threads or torch.get_num_threads()
    if dtype in _IN_PROCESS:
        return _measure_gemm(dtype, threads)
    return float(json.loads(_in_child(_CHILD, dtype, threads, timeout)))


@functools.cache
def matmul_fault(dtype: torch.dtype, timeout: float = 60.0) -> str | None:
    """Return None if the CPU can multiply matrices in this precision, else the reason; tried once, in a child process.

    Call it before computing in a precision below fp32: where it returns a reason, the product would crash the process.
    """
    if dtype in _IN_PROCESS:
        return None
    try:
        _in_child(_PROBE, dtype, torch.get_num_threads(), timeout)
    except GemmUnavailable as error:
        return str(error)
    return None


def _in_child(script: str, dtype: torch.dtype, threads: int, timeout: float) -> str:
    """Run a script that multiplies matrices in a child process and return its output; GemmUnavailable if it fails."""
    name = str(dtype).removeprefix("torch.")
    search_path = json.dumps([entry or os.getcwd() for entry in sys.path])
    command = [sys.executable, "-c", script, search_path, name, str(threads)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise GemmUnavailable(f"the {name} matrix product did not finish within {timeout:g} s") from None
    if child.returncode < 0:
        raise GemmUnavailable(f"the {name} matrix product crashed with {signal.Signals(-child.returncode).name}")

    if child.returncode > 0:
        reason = child.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GemmUnavailable(f"the {name} matrix product failed: {reason[0]}")
    return child.stdout


def _measure_gemm(dtype: torch.dtype, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best = 0.0
        for size in _GEMM_SIZES:
            rate = _gemm_rate(size, dtype)
            best = max(best, rate)
            if 2.0 * (2 * size) ** 3 / rate > 2 * _GEMM_SECONDS:
                break  # emulated precisions are thousands of times slower; larger products would take seconds
        return best
    finally:
        torch.set_num_threads(before)


def _gemm_rate(size: int, dtype: torch.dtype) -> float:
    left = torch.full((size, size), 0.5, dtype=dtype)
    right = torch.full((size, size), 0.25, dtype=dtype)
    out = torch.empty((size, size), dtype=dtype)
    torch.mm(left, right, out=out)
    shortest, products = float("inf"), 0
    end = time.perf_counter() + _GEMM_SECONDS
    while products < 1 or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        shortest = min(shortest, time.perf_counter() - start)
        products += 1
    return 2.0 * size**3 / shortest


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
