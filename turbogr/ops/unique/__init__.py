"""The distinct rows that a batch needs, and where each of its ids finds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr.ops import native, registry
from turbogr.ops.unique import cpu, reference


def unique_rows(ids: Tensor | Sequence[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    """Return (distinct ids in rising order [R] int64, index [n] int32 with distinct[index] == ids).

    ids of any shape, int64 or int32 with values in [0, num_rows), or several such tensors, taken one after the other
    without joining them first; n is the number of ids in all.

    Raises:
        ValueError: an id outside the table.
    """
    pieces = [ids] if isinstance(ids, Tensor) else list(ids)
    if not pieces:
        raise ValueError("unique_rows needs at least one tensor of ids, which may be empty")
    for piece in pieces:
        if piece.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be int64 or int32, got {piece.dtype}")
    distinct, index = registry.choose("unique_rows", pieces[0].device, torch.float32)(pieces, num_rows)
    return distinct, index


registry.register_reference("unique_rows", reference.unique_rows)
registry.register("unique_rows", registry.Backend("cpu", cpu.unique_rows, native.why_not))
