"""The compiled kernels: a shared library without Python or PyTorch inside, called through ctypes.

The library has each kernel once per instruction set, distinguished by a suffix; `isa()` is the one in use, chosen from
what the processor can run or by the environment variable TURBOGR_ISA. Its threads are those of PyTorch's pool, so
`torch.set_num_threads` is obeyed.

Kernels check nothing: a pointer and a shape go in, and the operators' contracts have been checked before.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.errors import UserError
from turbogr.ops.registry import Backend
from turbogr.random import dropout_threshold

INSTRUCTION_SETS = ("avx512", "avx2", "generic")

DROPOUT = "uint64 seed; int64 threshold; float dropout_scale"
"""The arguments of a kernel that `dropout_arguments` returns."""

# The library: another build if the environment names one, e.g. one for the sanitizers.
PATH = Path(os.environ.get("TURBOGR_KERNELS") or Path(__file__).with_name("_kernels.so"))
_NOT_BUILT = (
    "the C++ kernels are not built: no compiler was found at install time, or the build failed; "
    "install a C++ compiler and install turbogr again"
)
_HUGE_PAGE = 2**21
_NUMBERS = {"int64": ctypes.c_int64, "uint64": ctypes.c_uint64, "float": ctypes.c_float}


class _State:
    isa: str | None = None
    kernels: list[Kernel]


_state = _State()
_state.kernels = []


def isa() -> str:
    """Name of the instruction set in use."""
    if _state.isa is None:
        _state.isa = _choose_isa()
    return _state.isa


def available_isas() -> list[str]:
    """Instruction sets that were built and that this processor can run, best first."""
    loaded = library()
    return [
        name
        for name in INSTRUCTION_SETS
        if loaded.turbogr_runs(name.encode()) and hasattr(loaded, f"unique_rows_{name}")
    ]


def set_isa(name: str) -> None:
    """Use the kernels of one instruction set from now on; for tests and measurements.

    Raises:
        UserError: this machine cannot run it.
    """
    _require(name)
    _state.isa = name
    for kernel in _state.kernels:
        kernel.unbind()


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next tensors of this process instead of giving it back.

    A training step allocates and frees the same large tensors over and over. If freed memory goes back to the system,
    every allocation gets fresh pages, and clearing them costs several times as much as writing to them. All threads
    then share one heap, because the heaps of single threads would go back. Call it once, before training; memory stays
    at its peak. Returns False if the C library has no such setting; nothing changes then.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # of malloc.h
    options = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26), (arena_max, 1))
    return all(mallopt(option, value) == 1 for option, value in options)


def prefer_huge_pages(tensor: Tensor) -> bool:
    """Ask the system to back a large tensor with huge pages; call it before the tensor is first written to.

    Rows of a table are read in random order, and with small pages most of that time is address translation. Returns
    False if nothing was changed: another device or system, a small tensor, or huge pages turned off.
    """
    if tensor.device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if madvise is None or end <= begin:
        return False
    advice = 14  # MADV_HUGEPAGE of mman.h
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0)


class Argument(NamedTuple):
    """An argument of a kernel: its C++ type without `const` and `_t`, and its name."""

    type: str
    name: str


class Kernel:
    """One exported function, found at its first call.

    `arguments` are those of its C++ definition, as C declares variables, without `const` and `_t`:
    "float *x, *out; int64 width; float eps". A call passes them by position: for a pointer an address, a tensor's
    `data_ptr()` or None. tests/ops/test_prototypes.py compares them with the C++ source. `variant` names another build
    of the same source.
    """

    def __init__(self, name: str, arguments: str, *, variant: str | None = None) -> None:
        self.name = name
        self.arguments = parse_arguments(arguments)
        self._suffix = f"_{variant}" if variant else ""
        self._types = [_NUMBERS.get(argument.type, ctypes.c_void_p) for argument in self.arguments]
        self._function: Callable[..., int] | None = None
        _state.kernels.append(self)

    def unbind(self) -> None:
        self._function = None

    def __call__(self, *args: Any) -> None:
        """Run; raises MemoryError if there is no memory for the kernel's buffers."""
        function = self._function
        if function is None:
            function = getattr(library(), f"{self.name}_{isa()}{self._suffix}")
            function.argtypes = self._types  # type: ignore[attr-defined]
            function.restype = ctypes.c_int  # type: ignore[attr-defined]
            self._function = function
        if function(*args) != 0:
            raise MemoryError(f"no memory for the working buffers of the kernel {self.name}")


def kernels() -> list[Kernel]:
    """Every kernel that the imported modules have declared."""
    return list(_state.kernels)


def parse_arguments(text: str) -> list[Argument]:
    """Read "float *x, **parts; int64 width": arguments separated by commas, groups of one type by semicolons.

    Raises:
        ValueError: a group without a type or a name.
    """
    found = []
    for group in text.split(";"):
        base, _, names = group.strip().partition(" ")
        for declared in names.split(","):
            name = declared.strip().lstrip("*")
            if not name.isidentifier():
                raise ValueError(f"'{group.strip()}' is not a type followed by names")
            stars = declared.count("*")
            if not stars and base not in _NUMBERS:
                raise ValueError(f"{name} is {base}; a kernel takes pointers and {', '.join(_NUMBERS)}")
            found.append(Argument(base + "*" * stars, name))
    return found


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first element, or None."""
    return None if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """The tensors' addresses for a kernel that takes several; keep the array until the kernel has run."""
    return (ctypes.c_void_p * len(tensors))(*(pointer(tensor) for tensor in tensors))


def int64s(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Numbers for a kernel that takes several; keep the array until the kernel has run."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def dropout_arguments(rate: float, seed: int) -> tuple[int, int, float]:
    """Seed, threshold below which a random word drops an element, and scale of the elements that are kept."""
    return seed, dropout_threshold(rate), 1 / (1 - rate)


def packed_heads(x: Tensor) -> Tensor:
    """The tensor [T, h, d] itself if each token's heads are contiguous, else a copy in which they are."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def int64(index: Tensor) -> Tensor:
    """The index as the kernels read it: contiguous int64, copied only if it is not."""
    return index.to(torch.int64).contiguous()


def int32(index: Tensor) -> Tensor:
    """The same for kernels that read int32: positions in a working set, which never has 2^31 rows."""
    return index.to(torch.int32).contiguous()


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if not PATH.exists():
        return None, _NOT_BUILT
    try:
        loaded = ctypes.CDLL(str(PATH))
        loaded.turbogr_runs.argtypes = [ctypes.c_char_p]
        loaded.turbogr_init.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        loaded.turbogr_init.restype = None
    except (OSError, AttributeError) as error:
        return None, f"the C++ kernels cannot be loaded: {error}"
    loaded.turbogr_init(_torch_function("torch_parallel_for"), _torch_function("torch_get_num_threads"))
    return loaded, None


def _torch_function(name: str) -> int | None:
    """Address of a function of PyTorch's stable C interface. None if it is missing; kernels then run on one thread."""
    suffix = {"darwin": "dylib"}.get(sys.platform, "so")
    path = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    try:
        return ctypes.cast(getattr(ctypes.CDLL(str(path)), name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _choose_isa() -> str:
    wanted = os.environ.get("TURBOGR_ISA")
    if wanted:
        _require(wanted)
        return wanted
    return available_isas()[0]


def _require(name: str) -> None:
    possible = available_isas()
    if name not in possible:
        raise UserError(
            f"instruction set '{name}' cannot be used on this machine; choose from {', '.join(possible)} (TURBOGR_ISA)"
        )


def library() -> ctypes.CDLL:
    """The shared library.

    Raises:
        UserError: it is not built, or cannot be loaded; the message says why.
    """
    if _library is None:
        raise UserError(str(_problem))
    return _library


# Loaded with the module, so that choosing a backend stays simple enough for torch.compile to trace.
_library, _problem = _load()
BACKEND = Backend("cpu", devices=("cpu",), dtypes=(torch.float32,), problem=_problem)
"""The `BACKEND` of a module with functions on these kernels."""

MODEL_BACKEND = replace(BACKEND, dtypes=(torch.float32, torch.bfloat16))
"""The same for what models compute: declared functions, whose activations may be bf16 (`precision.py`)."""
