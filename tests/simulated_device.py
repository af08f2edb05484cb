"""An accelerator that is not there: tensors that compute like those of a CPU and mix with them no more than a GPU's do.

It goes by the name of "meta", the one device besides the CPU that every build of PyTorch can run autograd on.
Operations on both memories at once raise, but for copies between them and for single numbers of the host. `MEMORY`
counts the bytes that are on it; `SimulatedCopies` is its stream for copies, `SimulatedStream` that of a worker thread.

A real device works on while the host goes on. `ASKED` lists what would have made the host wait for it: reading a
number, copies to the host, copies from memory that is not pinned, results whose size depends on values. `COLLECTIVES`
lists what was sent between devices, in the order in which it was issued, with the thread that issued it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from turbogr.evaluation import job_pool
from turbogr.negatives import host_link
from turbogr.training.pipeline import workers

DEVICE = torch.device("meta")
_FUSED = "_get_fused_kernels_supported_devices"
_COPIES = ("aten::_to_copy", "aten::copy_")
_SIZES_FROM_VALUES = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal", "is_nonzero"}
)
ASKED: list[str] = []
COLLECTIVES: list[tuple[str, str]] = []


class _Memory:
    """Bytes by the storages that live tensors share."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        self.live = self.peak = 0
        self._lock = threading.RLock()

    def add(self, wrapper: Tensor, inner: Tensor) -> None:
        storage = inner.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        with self._lock:
            self.users[key] = self.users.get(key, 0) + 1
            self.live += size if self.users[key] == 1 else 0
            self.peak = max(self.peak, self.live)
        weakref.finalize(wrapper, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        with self._lock:
            self.users[key] -= 1
            self.live -= 0 if self.users[key] else size


MEMORY = _Memory()


class OnDevice(Tensor):
    """A tensor of the simulated device; `inner` holds its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        MEMORY.add(made, inner)
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.inner})"

    def tolist(self) -> Any:
        ASKED.append(f"tolist: {_where()}")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the numbers inside, and put results where they belong."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    there = any(isinstance(tensor, OnDevice) for tensor in tensors)
    device = kwargs.get("device")
    if device is not None:
        there = torch.device(device) == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    name = func._schema.name
    if there and name not in _COPIES:
        strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
        assert not strangers, f"{name} mixes memories: {[tuple(tensor.shape) for tensor in tensors]}"
    if name == "aten::copy_":
        there = isinstance(args[0], OnDevice)
    _note(name, there, tensors, args, kwargs, target=device)
    wrappers = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
    args, kwargs = tree_map(lambda value: value.inner if isinstance(value, OnDevice) else value, (args, kwargs))

    def wrap(value: Any) -> Any:
        if not there or not isinstance(value, Tensor):
            return value
        return wrappers[id(value)] if id(value) in wrappers else OnDevice(value)

    result = func(*args, **kwargs)
    return tree_map(wrap, result)


def _note(name: str, there: bool, tensors: Sequence[Tensor], args: Any, kwargs: dict[str, Any], target: Any) -> None:
    """Note what waits for the device, and what is sent between devices."""
    sources = [isinstance(tensor, OnDevice) for tensor in tensors]
    if not any(sources) and not there:
        return
    if name.startswith("c10d::"):
        COLLECTIVES.append((threading.current_thread().name, name.removeprefix("c10d::")))
        return
    short, asked = name.removeprefix("aten::"), ""
    if short in ("_to_copy", "copy_"):
        copied, at_once = tensors[-1], kwargs.get("non_blocking") or (short == "copy_" and args[2:] == (True,))
        crosses = there != sources[-1] and (short == "copy_" or target is not None)
        if crosses and not there:
            asked = "copy to the host"
        elif crosses and not at_once and copied.dim():
            asked = "copy from pageable memory"
    elif short == "repeat_interleave":
        asked = "" if kwargs.get("output_size") else short
    elif short == "_local_scalar_dense" or short in _SIZES_FROM_VALUES:
        asked = short
    elif short in ("index", "index_put_", "index_put", "_index_put_impl_"):
        by_mask = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
        asked = f"{short} by a mask" if by_mask else ""
    if asked:
        ASKED.append(f"{asked}: {_where()}")


def _where() -> str:
    """Return the innermost line of the package that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "/turbogr/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/turbogr/')[2]})"


class SimulatedDevice(TorchDispatchMode):
    """Inside this context "meta" is the simulated device, for the thread that entered it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class SimulatedCopies:
    """Copies are made when they are waited for; counts them and the bytes that pass through pinned memory."""

    posts = 0
    pinned_bytes = 0

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE
        self.device, self._posted = device, list[Callable[[], object]]()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        room = torch.zeros(shape, dtype=dtype)
        SimulatedCopies.pinned_bytes += room.nbytes
        return room.fill_(float("nan")) if dtype.is_floating_point else room

    def record_caller(self) -> None:
        return None

    def wait_event(self, event: None) -> None:
        pass

    def post(self, work: Callable[[], object]) -> None:
        SimulatedCopies.posts += 1
        self._posted.append(work)

    def synchronize(self) -> None:
        with SimulatedDevice():
            while self._posted:
                self._posted.pop(0)()


class SimulatedStream:
    """The stream of a worker thread, which knows the simulated device too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def active(self) -> SimulatedDevice | nullcontext[None]:
        return SimulatedDevice() if self.device == DEVICE else nullcontext()

    def record(self) -> None:
        return None


class SimulatedPool(ThreadPoolExecutor):
    """Threads that know the simulated device too."""

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Any:
        def inside() -> Any:
            with SimulatedDevice():
                return work(*args, **options)

        return super().submit(inside)


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package's streams, threads and fused optimisers be those of the simulated device."""
    monkeypatch.setattr(host_link, "CopyStream", SimulatedCopies)
    monkeypatch.setattr(workers, "WorkStream", SimulatedStream)
    monkeypatch.setattr(workers, "record_here", lambda device: None)
    monkeypatch.setattr(sys.modules[torch.optim.Optimizer.__module__], _FUSED, lambda: ["cpu", "meta"])
    monkeypatch.setattr(job_pool, "ThreadPoolExecutor", SimulatedPool)
    SimulatedCopies.posts = SimulatedCopies.pinned_bytes = 0
