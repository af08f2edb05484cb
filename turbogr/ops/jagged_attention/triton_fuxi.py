"""FuXi's attention on Triton kernels: content is attention without a bias, position and time are channels beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.ops import triton_runtime
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.jagged_attention.masks import KeyRanges
from turbogr.ops.jagged_attention.triton import (
    Bias,
    Call,
    backward,
    check_heads,
    forward,
    make_mask,
    product_options,
    sum_diagonals,
)
from turbogr.ops.jagged_attention.triton_relative import BiasTables, bins, plan_buckets
from turbogr.ops.triton_kernels.launching import (
    TileMap,
    channel_tile,
    chunk_of,
    diagonal_tile,
    map_tiles,
)
from turbogr.ops.triton_runtime import DEVICES, kernel, precision_of, target_of

BACKEND = triton_runtime.BACKEND


class _Inputs(NamedTuple):
    """The operator's arguments, and after `grad` its backward's; `time_weight` is (a, β, γ) if `functional`."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    offsets: Tensor
    first: Tensor | None
    last: Tensor | None
    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    time_weight: Tensor
    max_len: int
    functional: bool


def _content(inputs: _Inputs) -> Call:
    offsets = inputs.offsets.contiguous()
    mask = make_mask(inputs.first, inputs.last, offsets)
    return Call(offsets, mask, None, softmax=False, alpha=1.0, scale=1 / inputs.max_len)


def _bias(inputs: _Inputs) -> Bias:
    weights = inputs.position_weight.contiguous(), inputs.time_weight.contiguous()
    return Bias(inputs.query_times.contiguous(), inputs.key_times.contiguous(), *weights, inputs.max_len)


def _flat(v: Tensor) -> Tensor:
    """v [T, h, e] as [T, h * e], in place where the heads of a token are contiguous."""
    return v.reshape(v.shape[0], v.shape[1] * v.shape[2])


def _tables(bias: Bias, call: Call, rows: TileMap, block_q: int, block_k: int, functional: bool) -> BiasTables:
    """Tables of time buckets; tensors that are not read if time decays."""
    if functional:
        return BiasTables(call.offsets, bias.time_weight, rows.first_tile, 0)
    return plan_buckets(*bias[:2], bias.time_weight, call.offsets, rows, bias.max_len, block_q, block_k)


def _empty_output(q: Tensor | None, v: Tensor) -> Tensor:
    num_tokens, heads, e = v.shape
    return v.new_empty(num_tokens, heads, (2 + (q is not None)) * e)


@torch_operator("fuxi_attention_triton", fake=_empty_output, device=DEVICES)
def _forward(inputs: _Inputs) -> Tensor:
    out, e = _empty_output(inputs.q, inputs.v), inputs.v.shape[2]
    call, bias, v = _content(inputs), _bias(inputs), _flat(inputs.v)
    if inputs.q is not None and inputs.k is not None:
        check_heads(inputs.q.shape[2], e)
        forward(call, inputs.q, inputs.k, inputs.v, out[:, :, 2 * e :], None)
    width = v.shape[1]
    tile = channel_tile("channels_forward", precision_of(v), chunk_of(width), target_of(v))
    rows = map_tiles(call.offsets, v.shape[0], tile.block_q)
    if not rows.tile_sequence.numel():
        return out
    tables = _tables(bias, call, rows, tile.block_q, tile.block_k, inputs.functional)
    chunk = chunk_of(width)
    kernel("channels", "channels_forward")[(rows.tile_sequence.numel(), -(-width // chunk))](
        *(v, out, call.offsets, *rows, *call.mask[:2], *bias[:4], *tables[:3]),
        *(v.stride(0), *out.stride()[:2], width, bias.max_len, tables.plan_width),
        E=e,
        CHUNK=chunk,
        BLOCK_Q=tile.block_q,
        BLOCK_K=tile.block_k,
        DECAY=inputs.functional,
        RANGES=call.mask.is_given,
        **product_options(v),
        **tile.options(),
    )
    return out


_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _empty_gradients(
    q: Tensor | None, k: Tensor | None, v: Tensor, position_weight: Tensor, time_weight: Tensor
) -> _Gradients:
    def empty_like(x: Tensor | None) -> Tensor:
        return v.new_empty(0) if x is None else x.new_empty(x.shape)

    return empty_like(q), empty_like(k), empty_like(v), empty_like(position_weight), empty_like(time_weight)


@torch_operator("fuxi_attention_triton_backward", fake=_empty_gradients, device=DEVICES)
def _backward(grad: Tensor, needs_position_weight: bool, needs_time_weight: bool, inputs: _Inputs) -> _Gradients:
    call, bias, e = _content(inputs), _bias(inputs), inputs.v.shape[2]
    grad = grad.contiguous()
    v = _flat(inputs.v)
    grad_q = grad_k = v.new_empty(0)
    has_content = inputs.q is not None and inputs.k is not None
    if inputs.q is not None and inputs.k is not None:
        grad_q, grad_k, grad_v = backward(call, grad[:, :, 2 * e :], inputs.q, inputs.k, inputs.v, None, None)
    else:
        grad_v = inputs.v.new_empty(inputs.v.shape, dtype=torch.float32)
    _add_value_gradients(inputs, call, bias, grad, grad_v, add=has_content)
    weights = torch.zeros_like(bias.position_weight), torch.zeros_like(bias.time_weight)
    if needs_position_weight or needs_time_weight:
        weights = _weight_gradients(inputs, call, bias, grad, v)
    return grad_q, grad_k, grad_v.to(v.dtype), *weights


def _add_value_gradients(inputs: _Inputs, call: Call, bias: Bias, grad: Tensor, grad_v: Tensor, *, add: bool) -> None:
    """Write, or add, the channels' gradient of v to `grad_v` [T, h, e] fp32."""
    width = grad_v.shape[1] * grad_v.shape[2]
    chunk = chunk_of(width)
    tile = channel_tile("channels_backward_values", precision_of(grad), chunk, target_of(grad))
    keys = map_tiles(call.offsets, grad.shape[0], tile.block_k)
    rows = keys if tile.block_q == tile.block_k else map_tiles(call.offsets, grad.shape[0], tile.block_q)
    if not keys.tile_sequence.numel():
        return
    tables = _tables(bias, call, rows, tile.block_q, tile.block_k, inputs.functional)
    kernel("channels", "channels_backward_values")[(keys.tile_sequence.numel(), -(-width // chunk))](
        *(grad, grad_v, call.offsets, *keys, rows.first_tile, *call.mask[:2], *bias[:4], *tables[:3]),
        *(*grad.stride()[:2], width, bias.max_len, tables.plan_width),
        E=inputs.v.shape[2],
        CHUNK=chunk,
        BLOCK_Q=tile.block_q,
        BLOCK_K=tile.block_k,
        DECAY=inputs.functional,
        RANGES=call.mask.is_given,
        ADD=add,
        **product_options(grad),
        **tile.options(),
    )


def _weight_gradients(inputs: _Inputs, call: Call, bias: Bias, grad: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the position weights, and of the time weights or of a, β and γ."""
    num_weights = bias.time_weight.numel()
    table = (call.offsets, call.offsets) if inputs.functional else bins(num_weights - 1, call.offsets.device)
    chunk = min(64, chunk_of(v.shape[1]))
    tile = diagonal_tile("channel_weight_gradients", precision_of(v), chunk, target_of(v))

    def run(
        position_sums: Tensor, time_sums: Tensor, num_splits: int, num_diagonals: int, first_weight: int, weights: int
    ) -> None:
        kernel("channels", "channel_weight_gradients")[(num_diagonals, num_splits)](
            *(grad, v, call.offsets, *call.mask[:2], bias.query_times, bias.key_times, bias.time_weight, *table),
            *(position_sums, time_sums, *grad.stride()[:2], v.stride(0), v.shape[1]),
            *(call.offsets.numel() - 1, num_splits, num_diagonals, first_weight),
            E=inputs.v.shape[2],
            CHUNK=chunk,
            BLOCK=tile.block_q,
            WEIGHTS=weights,
            DECAY=inputs.functional,
            RANGES=call.mask.is_given,
            **product_options(v),
            **tile.options(),
        )

    return sum_diagonals(run, call, bias, tile.block_q, num_weights)


set_gradient(_forward, _backward, of="q k v position_weight time_weight")


def fuxi_attention(
    q: Tensor | None, k: Tensor | None, v: Tensor, offsets: Tensor, visible: KeyRanges | None, *bias_and_length: Any
) -> Tensor:
    """See `turbogr.ops.jagged_attention.fuxi.fuxi_attention`.

    `bias_and_length`: the times, position_weight, time_weight, max_len, and whether time_weight is a decay (a, β, γ).
    """
    out: Tensor = _forward(q, k, v, offsets, *(visible or (None, None)), *bias_and_length)
    return out
