"""Streams, events and pinned memory: the one module that knows of them.

On a CPU work is done when its call returns, and all of this does nothing. On an accelerator every worker thread has a
stream of its own. What passes between threads carries an event, and the receiver's stream waits for it, not the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from turbogr.accelerators import make_current

_WITHOUT_STREAMS = ("cpu", "mps", "meta")


def has_streams(device: torch.device) -> bool:
    """Whether work on a device can be ordered by streams; Apple's has one queue, which orders all work by itself."""
    return device.type not in _WITHOUT_STREAMS


class WorkStream:
    """The stream of one worker thread; may be made in any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device) if has_streams(device) else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Issue the device work of this thread on this stream inside the block."""
        with on_stream(self.device, self._stream):
            yield

    def record(self) -> Any:
        """Return an event after the work issued so far; None where that work is done already."""
        return None if self._stream is None else self._stream.record_event()


def current_stream(device: torch.device) -> Any:
    """Return the stream on which the calling thread issues its work; None where there are no streams."""
    return torch.accelerator.current_stream(device) if has_streams(device) else None


@contextmanager
def on_stream(device: torch.device, stream: Any) -> Iterator[None]:
    """Issue the device work of this thread on a stream inside the block; None leaves it where it is."""
    make_current(device)
    with nullcontext() if stream is None else stream:
        yield


class CopyStream:
    """A stream for copies between an accelerator and pinned host memory, beside its computations."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.Stream(device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory that the device can read and write by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def record_caller(self) -> Any:
        """Return an event after the device work that the calling thread has issued so far."""
        return record_here(self.device)

    def wait_event(self, event: Any) -> None:
        """Let work that is posted from now on wait for an event."""
        self._stream.wait_event(event)

    def post(self, work: Callable[[], object]) -> None:
        """Issue copies, and what is to be done on the device with their results."""
        with self._stream:
            work()

    def synchronize(self) -> None:
        """Wait until all posted work is done."""
        self._stream.synchronize()


def record_here(device: torch.device) -> Any:
    """Return an event after the device work that the calling thread has issued; None where that is done already."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def timed_event(device: torch.device) -> Any:
    """Return an event after the work that the calling thread has issued, whose time can be read; None without streams.

    `event.query()` says whether it has happened, and `first.elapsed_time(event)` how many milliseconds lie between.
    """
    stream = current_stream(device)
    return None if stream is None else stream.record_event(torch.Event(device, enable_timing=True))


def wait_for_event(event: Any, value: Any, device: torch.device) -> None:
    """Let the current stream wait for an event, and keep the memory of `value`'s tensors while the stream uses it."""
    if event is None:
        return
    stream = torch.accelerator.current_stream(device)
    stream.wait_event(event)
    for tensor in tensors_of(value):
        if tensor.device.type == device.type:
            tensor.record_stream(stream)  # type: ignore[arg-type]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: itself, or those in a dataclass, tuple, list or dict."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


_Movable = TypeVar("_Movable")


def upload(value: _Movable, device: torch.device) -> _Movable:
    """Return a tensor or batch on the device; to an accelerator it is copied from pinned memory without waiting."""
    if device.type == "cpu":
        return value
    movable: Any = value.pin_memory() if torch.accelerator.is_available() else value  # type: ignore[attr-defined]
    moved: _Movable = movable.to(device, non_blocking=True)
    return moved


def host_ints(values: Tensor) -> list[int]:
    """Return the elements of an integer tensor, of its copy in host memory where `keep_on_host` has named one."""
    kept: Tensor | None = getattr(values, "kept_on_host", None)
    found: list[int] = (values if kept is None else kept).tolist()
    return found


def keep_on_host(values: Tensor, on_host: Tensor) -> None:
    """Let `host_ints` of a tensor on an accelerator read its copy in host memory, without waiting for the device."""
    if values is not on_host:
        values.kept_on_host = on_host  # type: ignore[attr-defined]
