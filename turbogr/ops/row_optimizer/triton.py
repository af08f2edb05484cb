"""The row optimisers on Triton kernels: one pass over the rows that are updated, with the sum over duplicates in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turbogr.ops import triton_runtime
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import torch_operator
from turbogr.ops.norm_linear.cpu import strided_rows
from turbogr.ops.row_optimizer.cpu import require_contiguous
from turbogr.ops.triton_kernels.launching import Tile, segment_tile
from turbogr.ops.triton_passes import Segments, sort_by_row
from turbogr.ops.triton_runtime import DEVICES, kernel

BACKEND = triton_runtime.HOST_TOO_BACKEND


@torch.no_grad()
@torch_operator("row_adam_triton_", mutates="weight mean square", device=DEVICES)
def row_adam_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    index: Tensor,
    grad: Tensor,
    places: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """See `turbogr.ops.row_optimizer.row_adam_`."""
    require_contiguous(weight=weight, mean=mean, square=square)
    check_index("index", index, weight.shape[0])
    grad, segments, tile = _prepare(grad, places, index)
    if grad.numel():
        kernel("table_rows", "row_adam")[_grid(index, weight, tile)](
            *(weight, mean, square, index.contiguous(), grad, *segments, weight.shape[1], grad.stride(0)),
            *(1 - beta1, beta2, 1 - beta2, eps, 1 - lr * weight_decay),
            *(lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)),
            STEP=tile.block_q,
            BLOCK=tile.block_k,
            SUMMED=places is None,
            **tile.options(),
        )


@torch.no_grad()
@torch_operator("row_adagrad_triton_", mutates="weight square", device=DEVICES)
def row_adagrad_(
    weight: Tensor, square: Tensor, index: Tensor, grad: Tensor, places: Tensor | None, lr: float, eps: float
) -> None:
    """See `turbogr.ops.row_optimizer.row_adagrad_`."""
    require_contiguous(weight=weight, square=square)
    check_index("index", index, weight.shape[0])
    grad, segments, tile = _prepare(grad, places, index)
    if grad.numel():
        kernel("table_rows", "row_adagrad")[_grid(index, weight, tile)](
            *(weight, square, index.contiguous(), grad, *segments, weight.shape[1], grad.stride(0), lr, eps),
            STEP=tile.block_q,
            BLOCK=tile.block_k,
            SUMMED=places is None,
            **tile.options(),
        )


def _prepare(grad: Tensor, places: Tensor | None, index: Tensor) -> tuple[Tensor, Segments, Tile]:
    """The gradients, where those of each row are, and the tile; the segments of summed gradients are not read."""
    grad = strided_rows(grad)
    if places is None:
        return grad, Segments(index, index), segment_tile(grad.shape[1])
    check_index("places", places, index.shape[0])
    return grad, sort_by_row(places, index.shape[0]), segment_tile(grad.shape[1])


def _grid(index: Tensor, weight: Tensor, tile: Tile) -> tuple[int, int]:
    return index.numel(), -(-weight.shape[1] // tile.block_k)
