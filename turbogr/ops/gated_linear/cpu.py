"""gated_linear compiled: all in one with a small weight, else norm, gate and dropout in a pass by PyTorch's GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel, pointer
from turbogr.ops.norm_linear.cpu import NORMS, is_small, strided_rows
from turbogr.random import Dropout, dropout_threshold

_gated_linear_small = Kernel("gated_linear", "ppppppppiiiiiiifuif")
_gated_linear_small_backward = Kernel("gated_linear_backward", "ppppppppppiiiiiiiuif")
_gate = Kernel("gate", "pppppiiiiifuif")
_gate_backward = Kernel("gate_backward", "pppppppiiiiiuif")


def _gated_linear(
    x: Tensor,
    gate: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keys: Tensor | None,
    norm: str,
    eps: float,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    x, gate = strided_rows(x), strided_rows(gate)
    keys = None if keys is None else native.int64(keys)
    moments = x.new_empty(x.shape[0], 2)
    if is_small(weight):
        out = residual.new_empty(residual.shape)
        residual, weight = strided_rows(residual), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        _gated_linear_small(
            x.data_ptr(),
            gate.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            pointer(bias),
            pointer(keys),
            out.data_ptr(),
            moments.data_ptr(),
            *x.shape,
            weight.shape[1],
            x.stride(0),
            gate.stride(0),
            residual.stride(0),
            NORMS[norm],
            eps,
            *_dropout_arguments(rate, seed),
        )
        return out, moments
    gated = x.new_empty(x.shape)
    _gate(
        x.data_ptr(),
        gate.data_ptr(),
        pointer(keys),
        gated.data_ptr(),
        moments.data_ptr(),
        *x.shape,
        x.stride(0),
        gate.stride(0),
        NORMS[norm],
        eps,
        *_dropout_arguments(rate, seed),
    )
    out = torch.addmm(residual, gated, weight)
    if bias is not None:
        out += bias
    return out, moments


def _dropout_arguments(rate: float, seed: int) -> tuple[int, int, float]:
    return seed, dropout_threshold(rate), 1 / (1 - rate)


def _gradients(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    keys: Tensor | None,
    moments: Tensor,
    norm: str,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, gate = strided_rows(x), strided_rows(gate)
    keys = None if keys is None else native.int64(keys)
    grad_x, grad_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    if is_small(weight):
        grad, weight = strided_rows(grad), weight.contiguous()
        grad_weight, grad_bias = weight.new_empty(weight.shape), weight.new_empty(weight.shape[1])
        _gated_linear_small_backward(
            grad.data_ptr(),
            x.data_ptr(),
            gate.data_ptr(),
            weight.data_ptr(),
            pointer(keys),
            moments.data_ptr(),
            grad_x.data_ptr(),
            grad_gate.data_ptr(),
            grad_weight.data_ptr(),
            grad_bias.data_ptr(),
            *x.shape,
            weight.shape[1],
            grad.stride(0),
            x.stride(0),
            gate.stride(0),
            NORMS[norm],
            *_dropout_arguments(rate, seed),
        )
        return grad_x, grad_gate, grad_weight, grad_bias
    gated = torch.mm(grad, weight.t())
    _gate_backward(
        gated.data_ptr(),
        x.data_ptr(),
        gate.data_ptr(),
        pointer(keys),
        moments.data_ptr(),
        grad_x.data_ptr(),
        grad_gate.data_ptr(),
        *x.shape,
        x.stride(0),
        gate.stride(0),
        NORMS[norm],
        *_dropout_arguments(rate, seed),
    )
    return grad_x, grad_gate, torch.mm(gated.t(), grad), grad.sum(0)


def _fake(
    x: Tensor, gate: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *args: object
) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), x.new_empty(x.shape[0], 2)


def _fake_gradients(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        gate.new_empty(gate.shape),
        weight.new_empty(weight.shape),
        grad.new_empty(grad.shape[1]),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gate, _, weight, bias, keys, ctx.norm, _, ctx.rate, ctx.seed = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate, weight, keys, output[1])


def _differentiate(ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 10
    grad_x, grad_gate, grad_weight, grad_bias = torch.ops.turbogr.gated_linear_backward(
        grad, *ctx.saved_tensors, ctx.norm, ctx.rate, ctx.seed
    )
    bias = grad_bias if ctx.has_bias else None
    return grad_x, grad_gate, grad, grad_weight, bias, None, None, None, None, None


native.define(
    "gated_linear(Tensor x, Tensor gate, Tensor residual, Tensor weight, Tensor? bias, Tensor? keys, str norm, "
    "float eps, float rate, int seed) -> (Tensor, Tensor)",
    _gated_linear,
    _fake,
    backward=_differentiate,
    setup_context=_save,
)
native.define(
    "gated_linear_backward(Tensor grad, Tensor x, Tensor gate, Tensor weight, Tensor? keys, Tensor moments, str norm, "
    "float rate, int seed) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


def gated_linear(
    x: Tensor,
    gate: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    eps: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.gated_linear.gated_linear`."""
    rate, seed = dropout or (0.0, 0)
    out: Tensor = torch.ops.turbogr.gated_linear(x, gate, residual, weight, bias, keys, norm, eps, rate, seed)[0]
    return out
