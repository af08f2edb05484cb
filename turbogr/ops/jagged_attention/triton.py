"""HSTU's and softmax attention on Triton kernels; FuXi's is in `triton_fuxi.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.ops import triton_runtime
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.jagged_attention.masks import KeyRanges
from turbogr.ops.jagged_attention.triton_relative import (
    WEIGHT_BLOCK,
    add_diagonals,
    bins,
    plan_buckets,
    split_diagonals,
)
from turbogr.ops.native import packed_heads
from turbogr.ops.triton_kernels.launching import (
    MAX_BLOCK,
    TileMap,
    attention_tile,
    diagonal_tile,
    input_precision,
    map_tiles,
    padded,
)
from turbogr.ops.triton_runtime import DEVICES, is_interpreting, kernel, precision_of, target_of

BACKEND = triton_runtime.BACKEND


class Mask(NamedTuple):
    """The ranges of a mask, or any two tensors for causal attention."""

    first: Tensor
    last: Tensor
    is_given: bool


class Bias(NamedTuple):
    """Times and tables of the relative bias of one call."""

    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    time_weight: Tensor
    max_len: int


class Call(NamedTuple):
    """What all passes of one call share: the sequences, the mask, the bias, and how weights are made."""

    offsets: Tensor
    mask: Mask
    bias: Bias | None
    softmax: bool
    alpha: float
    scale: float


def make_mask(first: Tensor | None, last: Tensor | None, offsets: Tensor) -> Mask:
    """Kernels take two tensors even if they read none of them."""
    if first is None or last is None:
        return Mask(offsets, offsets, False)
    return Mask(first.contiguous(), last.contiguous(), True)


def check_heads(*sizes: int) -> None:
    """Refuse heads that no tile has room for."""
    if max(sizes) > MAX_BLOCK:
        raise ValueError(
            f"a head has size {max(sizes)}; Triton's kernels take heads up to {MAX_BLOCK}: use more heads, or "
            "train.backend=reference"
        )


def product_options(x: Tensor) -> dict[str, Any]:
    """Constants of a kernel that multiplies tensors like `x`."""
    return {"PRECISION": input_precision(precision_of(x), target_of(x)), "INTERPRETED": is_interpreting()}


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor | None) -> None:
    """Write attention's output to `out` [T, h, e], which may be strided, and softmax's log_sums [T, h]."""
    q, k, v = (packed_heads(x) for x in (q, k, v))
    tile, options = _options("attention_forward", call, q, v)
    rows = map_tiles(call.offsets, q.shape[0], tile.block_q)
    if not rows.tile_sequence.numel():
        return
    kernel("attention", "attention_forward")[(rows.tile_sequence.numel(), q.shape[1])](
        *(q, k, v, out, out if log_sums is None else log_sums, call.offsets, *rows, *call.mask[:2]),
        *_bias_arguments(call, q, rows, tile.block_q, tile.block_k),
        *_strides(q, k, v, out),
        *_numbers(call, tile.block_k),
        **options,
    )


def backward(
    call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, log_sums: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, packed. grad_v is fp32 if there is no `out`: FuXi adds its other channels to it."""
    q, k, v, grad = (packed_heads(x) for x in (q, k, v, grad))
    grad_q, grad_k = q.new_empty(q.shape), k.new_empty(k.shape)
    grad_v = v.new_empty(v.shape, dtype=torch.float32 if out is None else v.dtype)
    if not q.shape[0]:
        return grad_q, grad_k, grad_v
    if log_sums is None:
        log_sums = deltas = grad
    else:
        assert out is not None
        deltas = (grad.float() * out.float()).sum(2)
    tile, options = _options("attention_backward_keys", call, q, v)
    keys = map_tiles(call.offsets, q.shape[0], tile.block_k)
    rows = keys if tile.block_q == tile.block_k else map_tiles(call.offsets, q.shape[0], tile.block_q)
    bias = _bias_arguments(call, q, rows, tile.block_q, tile.block_k)
    inputs, strides = (grad, q, k, v), _strides(grad, q, k, v)
    kernel("attention", "attention_backward_keys")[(keys.tile_sequence.numel(), q.shape[1])](
        *(*inputs, grad_k, grad_v, log_sums, deltas, call.offsets, *keys, rows.first_tile, *call.mask[:2]),
        *(*bias, *strides, *_numbers(call, tile.block_k)),
        **options,
    )
    row_tile, options = _options("attention_backward_rows", call, q, v)
    if row_tile[:2] != tile[:2]:
        rows = map_tiles(call.offsets, q.shape[0], row_tile.block_q)
        bias = _bias_arguments(call, q, rows, row_tile.block_q, row_tile.block_k)
    kernel("attention", "attention_backward_rows")[(rows.tile_sequence.numel(), q.shape[1])](
        *(*inputs, grad_q, log_sums, deltas, call.offsets, *rows, *call.mask[:2]),
        *(*bias, *strides, *_numbers(call, row_tile.block_k)),
        **options,
    )
    return grad_q, grad_k, grad_v


def bias_gradients(call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of HSTU's position and time weights, in their type."""
    assert call.bias is not None
    bias = call.bias
    q, k, v, grad = (packed_heads(x) for x in (q, k, v, grad))
    tile = diagonal_tile("bias_gradients", precision_of(q), padded(max(q.shape[2], v.shape[2])), target_of(q))
    table = bins(bias.time_weight.numel() - 1, call.offsets.device)

    def run(
        position_sums: Tensor, time_sums: Tensor, num_splits: int, num_diagonals: int, first_weight: int, weights: int
    ) -> None:
        kernel("relative_weights", "bias_gradients")[(num_diagonals, num_splits)](
            *(grad, q, k, v, call.offsets, *call.mask[:2], bias.query_times, bias.key_times, bias.position_weight),
            *(*table, bias.time_weight, position_sums, time_sums, *_strides(grad, q, k, v), bias.max_len),
            *(call.offsets.numel() - 1, q.shape[1], num_splits, num_diagonals, first_weight, call.alpha, call.scale),
            D=q.shape[2],
            E=v.shape[2],
            BLOCK_D=padded(q.shape[2]),
            BLOCK_E=padded(v.shape[2]),
            BLOCK=tile.block_q,
            CHUNK=tile.chunk,
            WEIGHTS=weights,
            RANGES=call.mask.is_given,
            TANH=_uses_tanh(q),
            **product_options(q),
            **tile.options(),
        )

    return sum_diagonals(run, call, bias, tile.block_q, bias.time_weight.numel())


def sum_diagonals(run: Any, call: Call, bias: Bias, block: int, num_weights: int) -> tuple[Tensor, Tensor]:
    """Run a pass over diagonals and add up its partial sums: gradients of the position and the time weights."""
    device, num_sequences = call.offsets.device, call.offsets.numel() - 1
    ranges = call.mask.is_given
    splits = split_diagonals(bias.max_len, num_sequences, block, ranges=ranges)
    position_sums = torch.zeros(splits.diagonals, splits.parts, block, block, device=device)
    parts = []
    for first_weight in range(0, num_weights, WEIGHT_BLOCK):
        weights = min(WEIGHT_BLOCK, padded(num_weights))
        time_sums = torch.zeros(splits.diagonals * splits.parts, weights, device=device)
        if num_sequences:
            run(position_sums, time_sums, splits.parts, splits.diagonals, first_weight, weights)
        parts.append(time_sums.sum(0))
    position = add_diagonals(position_sums.sum(1), bias.max_len, ranges=ranges)
    time = torch.cat(parts)[:num_weights]
    return position.to(bias.position_weight.dtype), time.to(bias.time_weight.dtype)


def _options(name: str, call: Call, q: Tensor, v: Tensor) -> tuple[Any, dict[str, Any]]:
    block_d, block_e = padded(q.shape[2]), padded(v.shape[2])
    tile = attention_tile(name, precision_of(q), max(block_d, block_e), target_of(q), bias=call.bias is not None)
    options = {
        "D": q.shape[2],
        "E": v.shape[2],
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "CHUNK": tile.chunk,
        "SOFTMAX": call.softmax,
        "BIAS": call.bias is not None,
        "RANGES": call.mask.is_given,
        "TANH": _uses_tanh(q),
        **product_options(q),
        **tile.options(),
    }
    return tile, options


def _uses_tanh(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and target_of(x) == "cuda"


def _bias_arguments(call: Call, q: Tensor, rows: TileMap, block_q: int, block_k: int) -> tuple[Any, ...]:
    """Times, tables and plan; tensors that are not read if there is no bias."""
    bias = call.bias
    if bias is None:
        offsets, plan = call.offsets, rows.first_tile
        return offsets, offsets, q, q, offsets, q, plan
    tables = plan_buckets(*bias[:2], bias.time_weight, call.offsets, rows, bias.max_len, block_q, block_k)
    return (*bias[:4], *tables[:3])


def _numbers(call: Call, block_k: int) -> tuple[Any, ...]:
    max_len = 0 if call.bias is None else call.bias.max_len
    return max_len, -(-max_len // block_k), call.alpha, call.scale


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of tokens and of heads."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


class _Inputs(NamedTuple):
    """The arguments of HSTU's operator, and after `grad` those of its backward. Times and weights may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    first: Tensor | None
    last: Tensor | None
    query_times: Tensor | None
    key_times: Tensor | None
    position_weight: Tensor | None
    time_weight: Tensor | None
    max_len: int
    alpha: float


def _call(inputs: _Inputs) -> Call:
    check_heads(inputs.q.shape[2], inputs.v.shape[2])
    offsets = inputs.offsets.contiguous()
    bias = None
    if inputs.query_times is not None:
        given = (inputs.query_times, inputs.key_times, inputs.position_weight, inputs.time_weight)
        query_times, key_times, *weights = (x.contiguous() for x in given if x is not None)
        bias = Bias(query_times, key_times, weights[0], weights[1], inputs.max_len)
    mask = make_mask(inputs.first, inputs.last, offsets)
    return Call(offsets, mask, bias, softmax=False, alpha=inputs.alpha, scale=1 / inputs.max_len)


@torch_operator("hstu_attention_triton", fake=lambda v: v.new_empty(v.shape), device=DEVICES)
def _hstu(inputs: _Inputs) -> Tensor:
    out = inputs.v.new_empty(inputs.v.shape)
    forward(_call(inputs), inputs.q, inputs.k, inputs.v, out, None)
    return out


def _empty_hstu_gradients(
    q: Tensor, k: Tensor, v: Tensor, position_weight: Tensor | None, time_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights = (v.new_empty(0 if x is None else x.shape) for x in (position_weight, time_weight))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *weights  # type: ignore[return-value]


@torch_operator("hstu_attention_triton_backward", fake=_empty_hstu_gradients, device=DEVICES)
def _hstu_backward(
    grad: Tensor, needs_position_weight: bool, needs_time_weight: bool, inputs: _Inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _call(inputs)
    grads = backward(call, grad, inputs.q, inputs.k, inputs.v, inputs.v, None)
    if call.bias is None:
        return *grads, inputs.v.new_empty(0), inputs.v.new_empty(0)
    if not (needs_position_weight or needs_time_weight):
        return *grads, torch.zeros_like(call.bias.position_weight), torch.zeros_like(call.bias.time_weight)
    return *grads, *bias_gradients(call, grad, inputs.q, inputs.k, inputs.v)


set_gradient(_hstu, _hstu_backward, of="q k v position_weight time_weight")


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, visible: KeyRanges | None, *bias_and_numbers: Any
) -> Tensor:
    """See `turbogr.ops.jagged_attention.hstu_attention`.

    `bias_and_numbers`: the times, position_weight, time_weight, max_len and alpha.
    """
    out: Tensor = _hstu(q, k, v, offsets, *(visible or (None, None)), *bias_and_numbers)
    return out


class _SoftmaxInputs(NamedTuple):
    """The arguments of softmax's operator; those of its backward are the gradient, its outputs and the same."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    first: Tensor | None
    last: Tensor | None
    scale: float


def _softmax_call(inputs: _SoftmaxInputs) -> Call:
    check_heads(inputs.q.shape[2], inputs.v.shape[2])
    offsets = inputs.offsets.contiguous()
    mask = make_mask(inputs.first, inputs.last, offsets)
    return Call(offsets, mask, None, softmax=True, alpha=inputs.scale, scale=1.0)


def _empty_outputs(v: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(v.shape[:2], dtype=torch.float32)


@torch_operator("softmax_attention_triton", outputs="out log_sums", fake=_empty_outputs, device=DEVICES)
def _softmax(inputs: _SoftmaxInputs) -> tuple[Tensor, Tensor]:
    out, log_sums = _empty_outputs(inputs.v)
    forward(_softmax_call(inputs), inputs.q, inputs.k, inputs.v, out, log_sums)
    return out, log_sums


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch_operator("softmax_attention_triton_backward", fake=_empty_gradients, device=DEVICES)
def _softmax_backward(
    grad: Tensor, out: Tensor, log_sums: Tensor, inputs: _SoftmaxInputs
) -> tuple[Tensor, Tensor, Tensor]:
    return backward(_softmax_call(inputs), grad, inputs.q, inputs.k, inputs.v, out, log_sums)


set_gradient(_softmax, _softmax_backward, of="q k v")


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, visible: KeyRanges | None, scale: float
) -> Tensor:
    """See `turbogr.ops.jagged_attention.softmax.softmax_attention`."""
    out: Tensor = _softmax(q, k, v, offsets, *(visible or (None, None)), scale)[0]
    return out
