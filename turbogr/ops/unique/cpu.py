"""unique_rows on the compiled kernel: a bitmap of the rows, and each id's position by counting bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.declaration import torch_operator
from turbogr.ops.native import Kernel
from turbogr.ops.unique import reference

BACKEND = native.BACKEND

_kernel = Kernel(
    "unique_rows",
    "void **ids; int64 *counts, *bytes_each, *tables, num_pieces, *distinct; int32 *index; "
    "int64 *num_distinct, num_rows",
)

# Beyond this many rows per id, reading the whole bitmap costs more than sorting the ids.
_MAX_ROWS_PER_ID = 8192


def _empty_outputs(ids: list[Tensor]) -> tuple[Tensor, Tensor]:
    num_distinct = torch.library.get_ctx().new_dynamic_size()
    total = sum(tensor.numel() for tensor in ids)
    return ids[0].new_empty(num_distinct, dtype=torch.int64), ids[0].new_empty(total, dtype=torch.int32)


@torch_operator("unique_rows", outputs="distinct index", fake=_empty_outputs)
def _unique_rows(ids: list[Tensor], num_rows: int, tables: list[int]) -> tuple[Tensor, Tensor]:
    """`tables`: base and size of each tensor's table in turn, or nothing if ids are rows."""
    total = sum(tensor.numel() for tensor in ids)
    if num_rows > 2**20 and num_rows > _MAX_ROWS_PER_ID * total:
        return reference.unique_rows(ids, num_rows, _pairs(tables))
    ids = [tensor.contiguous() for tensor in ids]
    distinct = torch.empty(min(total, num_rows), dtype=torch.int64)
    index = torch.empty(total, dtype=torch.int32)
    num_distinct = ctypes.c_int64()
    addresses = native.addresses(ids)
    counts = native.int64s([tensor.numel() for tensor in ids])
    widths = native.int64s([tensor.element_size() for tensor in ids])
    tables_array = native.int64s(tables) if tables else None
    _kernel(
        ctypes.addressof(addresses),
        ctypes.addressof(counts),
        ctypes.addressof(widths),
        None if tables_array is None else ctypes.addressof(tables_array),
        len(ids),
        distinct.data_ptr(),
        index.data_ptr(),
        ctypes.addressof(num_distinct),
        num_rows,
    )
    if num_distinct.value < 0:
        reference.check_ids(ids, num_rows, _pairs(tables))
    return distinct[: num_distinct.value].clone(), index


def _pairs(tables: list[int]) -> list[tuple[int, int]] | None:
    return list(zip(tables[::2], tables[1::2], strict=True)) or None


def unique_rows(
    ids: list[Tensor], num_rows: int, bases: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor]:
    """See `turbogr.ops.unique.unique_rows`."""
    tables = [] if bases is None else [number for pair in bases for number in pair]
    distinct, index = _unique_rows(ids, num_rows, tables)
    return distinct, index
