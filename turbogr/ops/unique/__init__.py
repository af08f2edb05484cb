"""The distinct rows that a batch needs, and the position of each of its ids among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr.ops import registry


def unique_rows(
    ids: Tensor | Sequence[Tensor], num_rows: int, bases: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Return (distinct rows in rising order [R] int64, index [n] int32 with distinct[index] == ids).

    `ids` is a tensor of any shape, int64 or int32, or several of them, which are taken one after the other without
    being joined first; n is the number of ids in all. Without `bases` an id is a row, 0 <= id < num_rows.

    With `bases` each tensor belongs to a table that occupies rows base to base + size - 1: `bases` has one pair
    (base, size) per tensor, an id is 0 <= id < size, and its row is base + id.

    Raises:
        ValueError: an id outside its table, or a table outside the rows.
    """
    tensors = [ids] if isinstance(ids, Tensor) else list(ids)
    if not tensors:
        raise ValueError("unique_rows needs at least one tensor of ids, which may be empty")
    for tensor in tensors:
        if tensor.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be int64 or int32, got {tensor.dtype}")
    if bases is not None:
        _check_bases(bases, len(tensors), num_rows)
    distinct, index = registry.choose("unique_rows", tensors[0].device, torch.float32)(tensors, num_rows, bases)
    return distinct, index


def _check_bases(bases: Sequence[tuple[int, int]], num_tensors: int, num_rows: int) -> None:
    if len(bases) != num_tensors:
        raise ValueError(f"bases needs one pair (base, size) per tensor of ids: {num_tensors}, got {len(bases)}")
    for base, size in bases:
        if base < 0 or size < 0 or base + size > num_rows:
            raise ValueError(f"a table of {size} rows at base {base} is not inside the {num_rows} rows")


registry.register_operator("unique_rows", package=__name__)
