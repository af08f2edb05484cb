"""How the vectors of a segment come from host memory to the device that scores them, and their gradients go back.

`DirectLink` is for a device that is the host. `StagedLink` copies through pinned memory, beside what the device
computes, and vectors that are only negatives are copied in the precision in which they are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from turbogr.ops.sampled_softmax import Precision
from turbogr.ops.sampled_softmax.reference import int8_scale
from turbogr.streams import CopyStream


class Units(NamedTuple):
    """Rows [R, d] in host memory that are read as unit vectors; `inverse` [R] are their inverse lengths."""

    rows: Tensor
    inverse: Tensor

    def select(self, ids: Tensor, out: Tensor) -> None:
        """Write the unit vectors of `ids` [n] to `out` [n, d]."""
        torch.index_select(self.rows, 0, ids, out=out)
        out.mul_(self.inverse.index_select(0, ids)[:, None])


class Link(Protocol):
    """The way between host memory and a device.

    If it `overlaps`, a worker calls `bring` and `return_`, one at a time, while the device computes; else they are
    called in turn with the computations.
    """

    overlaps: bool

    def mark(self) -> Any:
        """Return a mark of all that the calling thread has asked of the device so far."""
        ...

    def bring(
        self, units: Units, ids: Tensor, exact: Tensor, buffer: Tensor, after: Any, beside: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Write the unit vectors of `ids` to `buffer` [n, d] on the device, once it has passed the mark `after`.

        They are there when this returns. Those at the places `exact`, which may name one twice, must not be rounded.
        Small tensors may be copied `beside` them; they are returned as tensors on the device.
        """
        ...

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor, after: Any) -> None:
        """Add a `gradient` [n, d], complete at the mark `after`, to total[ids] in host memory; no id comes twice."""
        ...


class DirectLink:
    """Host and device are one: nothing is copied, and a second thread would only take cores from the first."""

    overlaps = False

    def mark(self) -> None:
        return None

    def bring(
        self, units: Units, ids: Tensor, exact: Tensor, buffer: Tensor, after: Any, beside: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        units.select(ids, buffer)
        return list(beside)

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor, after: Any) -> None:
        total.index_add_(0, ids, gradient)


class StagedLink:
    """Gathers and rounds on the host, copies through pinned memory, widens on the device."""

    overlaps = True

    def __init__(self, copies: CopyStream, precision: Precision) -> None:
        self.copies, self.precision = copies, precision

    def mark(self) -> Any:
        return self.copies.record_caller()

    def bring(
        self, units: Units, ids: Tensor, exact: Tensor, buffer: Tensor, after: Any, beside: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        vectors = torch.empty(buffer.shape, dtype=buffer.dtype)
        units.select(ids, vectors)
        self.copies.wait_event(after)
        if self.precision == "fp32":
            staged = self._stage(vectors)
            self.copies.post(lambda: buffer.copy_(staged, non_blocking=True))
        else:
            places = exact.unique().long()
            scale = int8_scale(vectors) if self.precision == "int8" else torch.ones(1, 1)
            narrow = vectors.half() if self.precision == "fp16" else (vectors / scale).round_().to(torch.int8)
            parts = [self._stage(part) for part in (narrow, scale, places, vectors.index_select(0, places))]

            def widen() -> None:
                numbers, factors, at, whole = (part.to(buffer.device, non_blocking=True) for part in parts)
                torch.mul(numbers, factors, out=buffer)
                buffer.index_copy_(0, at, whole)

            self.copies.post(widen)
        # Made after the mark, so in memory of earlier segments that the device has done with.
        small, arrived = [self._stage(tensor) for tensor in beside], list[Tensor]()
        self.copies.post(lambda: arrived.extend(part.to(buffer.device, non_blocking=True) for part in small))
        self.copies.synchronize()
        return arrived

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor, after: Any) -> None:
        staged = self.copies.pinned(gradient.shape, gradient.dtype)
        self.copies.wait_event(after)
        self.copies.post(lambda: staged.copy_(gradient, non_blocking=True))
        self.copies.synchronize()
        total.index_add_(0, ids, staged)

    def _stage(self, tensor: Tensor) -> Tensor:
        return self.copies.pinned(tensor.shape, tensor.dtype).copy_(tensor)


def link_to(device: torch.device, host: torch.device, precision: Precision) -> Link:
    """Return the link from the `host`'s memory, where rows lie, to the device that scores them."""
    return DirectLink() if device == host else StagedLink(CopyStream(device), precision)
