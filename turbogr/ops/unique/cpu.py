"""unique_rows on the compiled kernel: rank in a bitmap of the table's rows."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel
from turbogr.ops.unique import reference

_kernel = Kernel("unique_rows", "ppppii")

# Beyond this many rows per id, going through the table's bitmap costs more than sorting the ids.
_SPARSE = 8192


def _unique_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    ids = native.int64(ids)
    if num_rows > 2**20 and num_rows > _SPARSE * ids.numel():
        return reference.unique_rows(ids, num_rows)
    distinct = torch.empty(min(ids.numel(), num_rows), dtype=torch.int64)
    index = torch.empty_like(ids)
    count = ctypes.c_int64()
    _kernel(
        ids.data_ptr(),
        distinct.data_ptr(),
        index.data_ptr(),
        ctypes.addressof(count),
        ids.numel(),
        num_rows,
    )
    return distinct[: count.value].clone(), index


def _fake(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(count, dtype=torch.int64), torch.empty_like(ids, dtype=torch.int64)


native.define("unique_rows(Tensor ids, int num_rows) -> (Tensor, Tensor)", _unique_rows, _fake)


def unique_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """See `turbogr.ops.unique.unique_rows`."""
    distinct, index = torch.ops.turbogr.unique_rows(ids, num_rows)
    return distinct, index
