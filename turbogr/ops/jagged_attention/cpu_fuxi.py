"""FuXi's attention on compiled kernels: position and time weights are made once per pair and serve all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.jagged_attention.reference import bucket_boundaries
from turbogr.ops.native import Kernel, packed_heads, pointer

_forward = Kernel("fuxi_forward", "p" * 10 + "i" * 11)
_backward = Kernel("fuxi_backward", "p" * 15 + "i" * 10)


def _attend(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    functional: bool,
) -> Tensor:
    q, k, v = _packed(q), _packed(k), packed_heads(v)
    offsets, query_times, key_times = offsets.contiguous(), query_times.contiguous(), key_times.contiguous()
    position_weight, time_weight = position_weight.contiguous(), time_weight.contiguous()
    boundaries = bucket_boundaries(0 if functional else time_weight.numel() - 1)
    num_tokens, heads, e = v.shape
    out = _fake(q, k, v)
    _forward(
        pointer(q),
        pointer(k),
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
        0 if q is None else q.shape[2],
        e,
        0 if q is None else q.stride(0),
        0 if k is None else k.stride(0),
        v.stride(0),
        max_len,
        time_weight.numel(),
        functional,
    )
    return out


def _gradients(
    grad: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    functional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad, q, k, v = grad.contiguous(), _packed(q), _packed(k), packed_heads(v)
    offsets, query_times, key_times = offsets.contiguous(), query_times.contiguous(), key_times.contiguous()
    position_weight, time_weight = position_weight.contiguous(), time_weight.contiguous()
    boundaries = bucket_boundaries(0 if functional else time_weight.numel() - 1)
    _, heads, e = v.shape
    grads = _fake_gradients(
        grad, q, k, v, offsets, query_times, key_times, position_weight, time_weight, max_len, functional
    )
    _backward(
        grad.data_ptr(),
        pointer(q),
        pointer(k),
        v.data_ptr(),
        offsets.data_ptr(),
        query_times.data_ptr(),
        key_times.data_ptr(),
        position_weight.data_ptr(),
        time_weight.data_ptr(),
        boundaries.data_ptr(),
        *(x.data_ptr() for x in grads),
        offsets.numel() - 1,
        heads,
        0 if q is None else q.shape[2],
        e,
        0 if q is None else q.stride(0),
        0 if k is None else k.stride(0),
        v.stride(0),
        max_len,
        time_weight.numel(),
        functional,
    )
    return grads


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else packed_heads(x)


def _fake(q: Tensor | None, k: Tensor | None, v: Tensor, *args: object) -> Tensor:
    num_tokens, heads, e = v.shape
    return v.new_empty(num_tokens, heads, (2 if q is None else 3) * e)


def _fake_gradients(
    grad: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    functional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    none = v.new_empty(0)
    grad_q, grad_k, grad_v, grad_position_weight, grad_time_weight = (
        none if x is None else x.new_empty(x.shape) for x in (q, k, v, position_weight, time_weight)
    )
    return grad_q, grad_k, grad_v, grad_position_weight, grad_time_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.max_len, ctx.functional = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad_q, grad_k, grad_v, grad_position_weight, grad_time_weight = torch.ops.turbogr.fuxi_attention_backward(
        grad, *ctx.saved_tensors, ctx.max_len, ctx.functional
    )
    if ctx.saved_tensors[0] is None:
        grad_q = grad_k = None
    return grad_q, grad_k, grad_v, None, None, None, grad_position_weight, grad_time_weight, None, None


_INPUTS = (
    "Tensor? q, Tensor? k, Tensor v, Tensor offsets, Tensor query_times, Tensor key_times, Tensor position_weight, "
    "Tensor time_weight, int max_len, bool functional"
)
native.define(f"fuxi_attention({_INPUTS}) -> Tensor", _attend, _fake, backward=_differentiate, setup_context=_save)
native.define(
    f"fuxi_attention_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


def fuxi_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    functional: bool,
) -> Tensor:
    """See `turbogr.ops.jagged_attention.fuxi.fuxi_attention`; `time_weight` is the decay (a, β, γ) if `functional`."""
    out: Tensor = torch.ops.turbogr.fuxi_attention(
        q, k, v, offsets, query_times, key_times, position_weight, time_weight, max_len, functional
    )
    return out
