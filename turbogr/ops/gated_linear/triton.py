"""gated_linear around the library's matrix product: norm, gate and dropout in one pass before it.

Two moments per row are kept. The backward's pass makes the gradients of x and the gate, and the gated rows once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import triton_passes, triton_runtime
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.norm_linear.cpu import strided_rows
from turbogr.ops.triton_passes import column_sums, dropout_words, empty_moments, weight_gradient, weight_like
from turbogr.ops.triton_runtime import DEVICES
from turbogr.random import Dropout

BACKEND = triton_runtime.BACKEND


def _empty_outputs(x: Tensor, residual: Tensor, norm: str) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), empty_moments(x, norm)


@torch_operator("gated_linear_triton", outputs="out moments", fake=_empty_outputs, device=DEVICES)
def _forward(
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
    gated, moments = triton_passes.normalize(x, gate, norm, eps, dropout_words(keys, rate, seed, x))
    if bias is None:
        return torch.addmm(residual, gated, weight_like(weight, x)), moments
    product, out = gated @ weight_like(weight, x), residual.new_empty(residual.shape)
    triton_passes.activate(product, bias, out, silu=False, residual=strided_rows(residual))
    return out, moments


def _empty_gradients(
    x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_bias = weight.new_empty(0 if bias is None else bias.shape)
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape), grad_bias


@torch_operator("gated_linear_triton_backward", fake=_empty_gradients, device=DEVICES)
def _backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keys: Tensor | None,
    moments: Tensor,
    norm: str,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, gate = strided_rows(x), strided_rows(gate)
    grad_gated = grad @ weight_like(weight, x).T
    drop = dropout_words(keys, rate, seed, x)
    grad_x, grad_gate, gated = triton_passes.normalize_backward(grad_gated, x, gate, moments, norm, drop)
    grad_bias = weight.new_empty(0) if bias is None else column_sums(grad, bias)
    return grad_x, grad_gate, weight_gradient(gated, grad, weight), grad_bias


set_gradient(_forward, _backward, of="x gate weight bias", unchanged="residual")


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
    out: Tensor = _forward(x, gate, residual, weight, bias, keys, norm, eps, rate, seed)[0]
    return out
