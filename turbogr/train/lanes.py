"""Where the device work of a thread goes: the one place that knows of streams, events and pinned memory.

On a CPU work is done when its call returns, and all of this is nothing. On an accelerator every worker has a stream of
its own; what is handed to it and what it hands over carries an event, and whoever takes it makes its own stream wait
for that, not the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from turbogr.data.batching import Batch


class Lane:
    """A queue of device work, in order; made in any thread, used by one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Send the device work of this thread here inside the block."""
        if self._stream is None:
            yield
        else:
            with self._stream:
                yield

    def mark(self) -> Any:
        """Return an event of what has been sent here so far, None where that is done already."""
        return None if self._stream is None else self._stream.record_event()


def mark_here(device: torch.device) -> Any:
    """Return an event of the device work that the calling thread has sent so far, None where that is done already."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def follow(mark: Any, value: Any, device: torch.device) -> None:
    """Let the current stream wait for a `mark` and own the tensors of `value` as long as it uses them."""
    if mark is None:
        return
    stream = torch.accelerator.current_stream(device)
    stream.wait_event(mark)
    for tensor in tensors_of(value):
        if tensor.device.type == device.type:
            tensor.record_stream(stream)  # type: ignore[arg-type]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: itself, or of a dataclass, tuple, list or dict those of its parts."""
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


def upload(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device; to an accelerator it is copied from pinned memory without waiting."""
    return batch if device.type == "cpu" else batch.pin_memory().to(device, non_blocking=True)
