"""Causal softmax attention on compiled kernels: a running maximum and sum forward, probabilities again backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_offsets
from turbogr.ops.native import Kernel, packed_heads

_forward = Kernel("softmax_forward", "p" * 6 + "i" * 8 + "f")
_backward = Kernel("softmax_backward", "p" * 10 + "i" * 7 + "f")


def _attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    check_offsets(offsets, q.shape[0])
    q, k, v, offsets = packed_heads(q), packed_heads(k), packed_heads(v), offsets.contiguous()
    num_tokens, heads, d = q.shape
    out, log_sums = _fake(q, k, v)
    _forward(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        offsets.data_ptr(),
        out.data_ptr(),
        log_sums.data_ptr(),
        offsets.numel() - 1,
        num_tokens,
        heads,
        d,
        v.shape[2],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale,
    )
    return out, log_sums


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, out: Tensor, log_sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out, offsets = grad.contiguous(), out.contiguous(), offsets.contiguous()
    q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
    grads = _fake_gradients(grad, q, k, v)
    _, heads, d = q.shape
    _backward(
        grad.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        offsets.data_ptr(),
        out.data_ptr(),
        log_sums.data_ptr(),
        *(x.data_ptr() for x in grads),
        offsets.numel() - 1,
        heads,
        d,
        v.shape[2],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale,
    )
    return grads


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(v.shape[:2])


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor | None, unused: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 5
    grads = torch.ops.turbogr.softmax_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None


native.define(
    "softmax_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, float scale) -> (Tensor, Tensor)",
    _attend,
    _fake,
    backward=_differentiate,
    setup_context=_save,
)
native.define(
    "softmax_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor out, "
    "Tensor log_sums, float scale) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """See `turbogr.ops.jagged_attention.softmax.softmax_attention`."""
    out: Tensor = torch.ops.turbogr.softmax_attention(q, k, v, offsets, scale)[0]
    return out
