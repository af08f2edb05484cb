"""Which unit of the processor multiplies bf16 numbers: AMX tiles, AVX512_BF16, or none.

With `none`, products of bf16 numbers are computed in fp32. A unit is tried in a child process before this one uses it:
a virtual machine may announce instructions that crash, and hide others that work. The environment variable
`TURBOGR_BF16` names the unit to use instead of the best one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from turbogr.errors import UserError, did_you_mean
from turbogr.ops import native

UNITS = ("amx", "avx512_bf16", "none")
ENVIRONMENT = "TURBOGR_BF16"

_NUMBERS = {"none": 0, "avx512_bf16": 1, "amx": 2}  # Bf16Unit of csrc/runtime.h
_LOOPS = {"avx512_bf16": "avx512_bf16", "amx": "amx_bf16"}  # of csrc/fma_peak.cpp

_PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.turbogr_fma_flops.restype = ctypes.c_int64
name = sys.argv[2].encode()
if not library.turbogr_fma_flops(name):
    sys.exit(3)
library.turbogr_fma_run(name, ctypes.c_int64(1000), ctypes.c_int64(1))
"""


class _State:
    unit: str | None = None


@functools.cache
def loop_fault(loop: str) -> str | None:
    """Why a loop of csrc/fma_peak.cpp cannot run on this machine, None if it can; tried in a child process."""
    library = native.library()
    if not hasattr(library, "turbogr_fma_flops"):
        return f"{native.PATH} was built from older sources; install turbogr again"
    library.turbogr_fma_flops.restype = ctypes.c_int64
    # For tiles this also asks the system for permission, for all threads of this process.
    if not library.turbogr_fma_flops(loop.encode()):
        return "this processor, or the compiler that built the kernels, does not have it"
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(native.PATH), loop]
    try:
        child = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "it did not finish within 60 s"
    if child.returncode < 0:
        return f"it crashed with {signal.Signals(-child.returncode).name}"
    return None if child.returncode == 0 else f"it failed with status {child.returncode}"


def problem(unit: str) -> str | None:
    """Why a unit cannot be used by this process, None if it can."""
    if unit == "none":
        return None
    if native.BACKEND.problem is not None:
        return native.BACKEND.problem
    if native.isa() != "avx512" or not hasattr(native.library(), "bf16_gemm_avx512"):
        return f"the kernels of the instruction set {native.isa()} have no products in bf16"
    return loop_fault(_LOOPS[unit])


def in_use() -> str:
    """The unit that kernels use from the first call on: that of the environment, else the best one that works.

    Raises:
        UserError: the environment names an unknown unit, or one that does not work here.
    """
    if _State.unit is None:
        use(os.environ.get(ENVIRONMENT) or best())
    assert _State.unit is not None
    return _State.unit


def best() -> str:
    """The first of `UNITS` that works here."""
    return next(unit for unit in UNITS if problem(unit) is None)


def use(unit: str) -> None:
    """Multiply bf16 by this unit from now on.

    Raises:
        UserError: an unknown unit, or one that does not work here.
    """
    if unit not in UNITS:
        hint = did_you_mean(unit, UNITS)
        raise UserError(f"{ENVIRONMENT}={unit}: unknown unit for bf16, choose from {', '.join(UNITS)}.{hint}")
    reason = problem(unit)
    if reason is not None:
        raise UserError(f"{ENVIRONMENT}={unit}: it cannot be used on this machine: {reason}")
    if native.BACKEND.problem is None and hasattr(native.library(), "turbogr_set_bf16_unit"):
        native.library().turbogr_set_bf16_unit(ctypes.c_int(_NUMBERS[unit]))
    _State.unit = unit


@contextmanager
def using(unit: str) -> Iterator[None]:
    """Use a unit inside a `with` block."""
    before = in_use()
    use(unit)
    try:
        yield
    finally:
        use(before)
