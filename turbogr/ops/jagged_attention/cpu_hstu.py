"""HSTU attention on compiled kernels: tiled, with a backward that recomputes the scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.jagged_attention.reference import bucket_boundaries
from turbogr.ops.native import Kernel, packed_heads

_hstu_forward = Kernel("hstu_forward", "p" * 10 + "i" * 10)
_hstu_backward = Kernel("hstu_backward", "p" * 15 + "i" * 12)


def _hstu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
) -> Tensor:
    q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
    offsets, query_times, key_times = offsets.contiguous(), query_times.contiguous(), key_times.contiguous()
    position_weight, time_weight = position_weight.contiguous(), time_weight.contiguous()
    boundaries = bucket_boundaries(time_weight.numel() - 1)
    num_tokens, heads, d = q.shape
    out = v.new_empty(v.shape)
    _hstu_forward(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        offsets.data_ptr(),
        query_times.data_ptr(),
        key_times.data_ptr(),
        position_weight.data_ptr(),
        time_weight.data_ptr(),
        boundaries.data_ptr(),
        out.data_ptr(),
        offsets.numel() - 1,
        num_tokens,
        heads,
        d,
        v.shape[2],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        max_len,
        time_weight.numel(),
    )
    return out


def _hstu_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
    offsets, query_times, key_times = offsets.contiguous(), query_times.contiguous(), key_times.contiguous()
    position_weight, time_weight = position_weight.contiguous(), time_weight.contiguous()
    boundaries = bucket_boundaries(time_weight.numel() - 1)
    _, heads, d = q.shape
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    grad_position_weight, grad_time_weight = torch.empty_like(position_weight), torch.empty_like(time_weight)
    _hstu_backward(
        grad.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        offsets.data_ptr(),
        query_times.data_ptr(),
        key_times.data_ptr(),
        position_weight.data_ptr(),
        time_weight.data_ptr(),
        boundaries.data_ptr(),
        grad_q.data_ptr(),
        grad_k.data_ptr(),
        grad_v.data_ptr(),
        grad_position_weight.data_ptr(),
        grad_time_weight.data_ptr(),
        offsets.numel() - 1,
        heads,
        d,
        v.shape[2],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        grad_q.stride(0),
        grad_k.stride(0),
        grad_v.stride(0),
        max_len,
        time_weight.numel(),
    )
    return grad_q, grad_k, grad_v, grad_position_weight, grad_time_weight


def _fake_hstu(q: Tensor, k: Tensor, v: Tensor, *args: object) -> Tensor:
    return v.new_empty(v.shape)


def _fake_hstu_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = [x.new_empty(x.shape) for x in (q, k, v, position_weight, time_weight)]
    return grads[0], grads[1], grads[2], grads[3], grads[4]


def _save_hstu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.max_len = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_hstu(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.turbogr.hstu_attention_backward(grad, *ctx.saved_tensors, ctx.max_len)
    grad_q, grad_k, grad_v, grad_position_weight, grad_time_weight = grads
    return grad_q, grad_k, grad_v, None, None, None, grad_position_weight, grad_time_weight, None


_HSTU_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor query_times, Tensor key_times, Tensor position_weight, "
    "Tensor time_weight, int max_len"
)
native.define(
    f"hstu_attention({_HSTU_INPUTS}) -> Tensor",
    _hstu,
    _fake_hstu,
    backward=_differentiate_hstu,
    setup_context=_save_hstu,
)
native.define(
    f"hstu_attention_backward(Tensor grad, {_HSTU_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _hstu_gradients,
    _fake_hstu_gradients,
)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
) -> Tensor:
    """See `turbogr.ops.jagged_attention.hstu_attention`."""
    out: Tensor = torch.ops.turbogr.hstu_attention(
        q, k, v, offsets, query_times, key_times, position_weight, time_weight, max_len
    )
    return out
