"""look_up_rows on compiled kernels: the ids of all pieces are spread over all cores, forward and backward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import Kernel

BACKEND = native.BACKEND

_forward_kernel = Kernel(
    "look_up_forward", "float *rows; int32 *index; int64 *starts; float **outs; int64 num_features, width"
)
_backward_kernel = Kernel(
    "look_up_backward",
    "float **grads; int32 *index; int64 *starts; float *grad_rows; int64 num_features, num_rows, width",
)


def _empty_pieces(rows: Tensor, counts: list[int]) -> list[Tensor]:
    return [rows.new_empty(count, rows.shape[1]) for count in counts]


@torch_operator("look_up_rows", fake=_empty_pieces)
def _forward(rows: Tensor, index: Tensor, counts: list[int]) -> list[Tensor]:
    check_index("index", index, rows.shape[0])
    rows, index = rows.contiguous(), native.int32(index)
    outs = _empty_pieces(rows, counts)
    starts, addresses = _starts(counts), native.addresses(outs)
    _forward_kernel(
        rows.data_ptr(),
        index.data_ptr(),
        ctypes.addressof(starts),
        ctypes.addressof(addresses),
        len(counts),
        rows.shape[1],
    )
    return outs


@torch_operator("look_up_rows_backward", fake=lambda index, num_rows, width: _empty_gradient(index, num_rows, width))
def _backward(grads: list[Tensor | None], index: Tensor, counts: list[int], num_rows: int, width: int) -> Tensor:
    return sum_rows(grads, index, counts, num_rows, width)


def sum_rows(grads: Sequence[Tensor | None], index: Tensor, counts: Sequence[int], num_rows: int, width: int) -> Tensor:
    """The sums [num_rows, width] of gradients by row. A piece without a gradient counts as zeros."""
    contiguous = [None if grad is None else grad.contiguous() for grad in grads]
    index = native.int32(index)
    out = _empty_gradient(index, num_rows, width)
    starts, addresses = _starts(counts), native.addresses(contiguous)
    _backward_kernel(
        ctypes.addressof(addresses),
        index.data_ptr(),
        ctypes.addressof(starts),
        out.data_ptr(),
        len(counts),
        num_rows,
        width,
    )
    return out


def _empty_gradient(index: Tensor, num_rows: int, width: int) -> Tensor:
    return index.new_empty(num_rows, width, dtype=torch.float32)


def _starts(counts: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return native.int64s([0, *accumulate(counts)])


set_gradient(
    _forward,
    _backward,
    of="rows",
    saved=lambda rows: {"num_rows": rows.shape[0], "width": rows.shape[1]},
)


def look_up_rows(rows: Tensor, index: Tensor, counts: list[int]) -> list[Tensor]:
    """See `turbogr.ops.look_up.look_up_rows`."""
    pieces: list[Tensor] = _forward(rows, index, counts)
    return pieces
