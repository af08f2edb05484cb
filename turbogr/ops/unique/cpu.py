"""unique_rows on the compiled kernel: rank in a bitmap of the table's rows."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.native import Kernel
from turbogr.ops.unique import reference

_kernel = Kernel("unique_rows", "pppipppi")

# Beyond this many rows per id, going through the table's bitmap costs more than sorting the ids.
_SPARSE = 8192


def _unique_rows(pieces: list[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    total = sum(ids.numel() for ids in pieces)
    if num_rows > 2**20 and num_rows > _SPARSE * total:
        return reference.unique_rows(pieces, num_rows)
    pieces = [ids.contiguous() for ids in pieces]
    distinct = torch.empty(min(total, num_rows), dtype=torch.int64)
    index = torch.empty(total, dtype=torch.int32)
    num_distinct = ctypes.c_int64()
    addresses = native.addresses(pieces)
    counts = native.int64s([ids.numel() for ids in pieces])
    widths = native.int64s([ids.element_size() for ids in pieces])
    _kernel(
        ctypes.addressof(addresses),
        ctypes.addressof(counts),
        ctypes.addressof(widths),
        len(pieces),
        distinct.data_ptr(),
        index.data_ptr(),
        ctypes.addressof(num_distinct),
        num_rows,
    )
    if num_distinct.value < 0:
        for ids in pieces:
            check_index("ids", ids, num_rows)
    return distinct[: num_distinct.value].clone(), index


def _fake(pieces: list[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    total = sum(ids.numel() for ids in pieces)
    return pieces[0].new_empty(count, dtype=torch.int64), pieces[0].new_empty(total, dtype=torch.int32)


native.define("unique_rows(Tensor[] ids, int num_rows) -> (Tensor, Tensor)", _unique_rows, _fake)


def unique_rows(pieces: list[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    """See `turbogr.ops.unique.unique_rows`."""
    distinct, index = torch.ops.turbogr.unique_rows(pieces, num_rows)
    return distinct, index
