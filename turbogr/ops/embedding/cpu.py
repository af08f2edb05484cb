"""embed on compiled kernels: one pass forward, and a backward that sums each row's tokens in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.native import Kernel, pointer
from turbogr.random import Dropout, dropout_threshold

_forward = Kernel("embed_forward", "ppppppiifuif")
_backward = Kernel("embed_backward", "ppppppiiiifuif")


def _embed(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor,
    positions: Tensor,
    keys: Tensor | None,
    scale: float,
    rate: float,
    seed: int,
) -> Tensor:
    check_index("index", index, rows.shape[0])
    check_index("positions", positions, position_rows.shape[0])
    rows, position_rows = rows.contiguous(), position_rows.contiguous()
    index, positions = native.int64(index), native.int64(positions)
    keys = None if keys is None else native.int64(keys)
    num_tokens, width = index.numel(), rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    _forward(
        rows.data_ptr(),
        index.data_ptr(),
        position_rows.data_ptr(),
        positions.data_ptr(),
        pointer(keys),
        out.data_ptr(),
        num_tokens,
        width,
        scale,
        seed,
        dropout_threshold(rate),
        1 / (1 - rate),
    )
    return out


def _embed_backward(
    grad: Tensor,
    index: Tensor,
    positions: Tensor,
    keys: Tensor | None,
    num_rows: int,
    num_positions: int,
    scale: float,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    index, positions = native.int64(index), native.int64(positions)
    keys = None if keys is None else native.int64(keys)
    num_tokens, width = grad.shape
    # A size of 0 means that a gradient is not wanted: an empty tensor has no address, and the kernel leaves it out.
    grad_rows = grad.new_empty(num_rows, width)
    grad_position_rows = grad.new_empty(num_positions, width)
    _backward(
        grad.data_ptr(),
        index.data_ptr(),
        positions.data_ptr(),
        pointer(keys),
        grad_rows.data_ptr(),
        grad_position_rows.data_ptr(),
        num_tokens,
        width,
        num_rows,
        num_positions,
        scale,
        seed,
        dropout_threshold(rate),
        1 / (1 - rate),
    )
    return grad_rows, grad_position_rows


def _fake(rows: Tensor, index: Tensor, *args: object) -> Tensor:
    return rows.new_empty(index.shape[0], rows.shape[1])


def _fake_backward(
    grad: Tensor,
    index: Tensor,
    positions: Tensor,
    keys: Tensor | None,
    num_rows: int,
    num_positions: int,
    *args: object,
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(num_rows, grad.shape[1]), grad.new_empty(num_positions, grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, index, position_rows, positions, keys, ctx.scale, ctx.rate, ctx.seed = inputs
    ctx.sizes = rows.shape[0], position_rows.shape[0]
    ctx.save_for_backward(index, positions, keys)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index, positions, keys = ctx.saved_tensors
    need_rows, _, need_positions, *_ = ctx.needs_input_grad
    num_rows, num_positions = ctx.sizes
    grad_rows, grad_position_rows = torch.ops.turbogr.embed_backward(
        grad,
        index,
        positions,
        keys,
        num_rows if need_rows else 0,
        num_positions if need_positions else 0,
        ctx.scale,
        ctx.rate,
        ctx.seed,
    )
    rows = grad_rows if need_rows else None
    return rows, None, grad_position_rows if need_positions else None, None, None, None, None, None


native.define(
    "embed(Tensor rows, Tensor index, Tensor position_rows, Tensor positions, Tensor? keys, float scale, "
    "float rate, int seed) -> Tensor",
    _embed,
    _fake,
    backward=_autograd,
    setup_context=_setup_context,
)
native.define(
    "embed_backward(Tensor grad, Tensor index, Tensor positions, Tensor? keys, int num_rows, int num_positions, "
    "float scale, float rate, int seed) -> (Tensor, Tensor)",
    _embed_backward,
    _fake_backward,
)


def embed(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor,
    positions: Tensor,
    scale: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.embedding.embed`."""
    rate, seed = dropout or (0.0, 0)
    out: Tensor = torch.ops.turbogr.embed(rows, index, position_rows, positions, keys, scale, rate, seed)
    return out
