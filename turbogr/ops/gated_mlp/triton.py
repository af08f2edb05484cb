"""gated_mlp around the library's matrix products: norm and dropout before them, SiLU and the gate between them.

Kept for the backward: the two products before the gate, and two moments per row. The rows that both products read and
the hidden vectors are made again, in the passes that make the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import triton_passes, triton_runtime
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.norm_linear.cpu import strided_rows
from turbogr.ops.triton_passes import dropout_words, empty_moments, weight_gradient, weight_like
from turbogr.ops.triton_runtime import DEVICES
from turbogr.random import Dropout

BACKEND = triton_runtime.BACKEND


def _empty_outputs(x: Tensor, gate_weight: Tensor, norm: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and for the backward: the products with both weights, and the moments of the rows."""
    hidden = x.shape[0], gate_weight.shape[1]
    return x.new_empty(x.shape), x.new_empty(hidden), x.new_empty(hidden), empty_moments(x, norm)


@torch_operator("gated_mlp_triton", outputs="out gate up moments", fake=_empty_outputs, device=DEVICES)
def _forward(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    keys: Tensor | None,
    norm: str,
    eps: float,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inner, moments = triton_passes.normalize(strided_rows(x), None, norm, eps, dropout_words(keys, rate, seed, x))
    gate, up = inner @ weight_like(gate_weight, x), inner @ weight_like(up_weight, x)
    hidden = triton_passes.gate_by_silu(gate, up)
    return torch.addmm(x, hidden, weight_like(down_weight, x)), gate, up, moments


def _empty_gradients(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_gate, grad_up, grad_down = (weight.new_empty(weight.shape) for weight in (gate_weight, up_weight, down_weight))
    return x.new_empty(x.shape), grad_gate, grad_up, grad_down


@torch_operator("gated_mlp_triton_backward", fake=_empty_gradients, device=DEVICES)
def _backward(
    grad: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    keys: Tensor | None,
    gate: Tensor,
    up: Tensor,
    moments: Tensor,
    norm: str,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, x = strided_rows(grad), strided_rows(x)
    grad_hidden = grad @ weight_like(down_weight, x).T
    grad_gate, grad_up, hidden = triton_passes.gate_by_silu_backward(grad_hidden, gate, up)
    grad_down = weight_gradient(hidden, grad, down_weight)
    grad_inner = torch.addmm(grad_gate @ weight_like(gate_weight, x).T, grad_up, weight_like(up_weight, x).T)
    drop = dropout_words(keys, rate, seed, x)
    grad_x, _, inner = triton_passes.normalize_backward(grad_inner, x, None, moments, norm, drop, grad)
    grad_weights = weight_gradient(inner, grad_gate, gate_weight), weight_gradient(inner, grad_up, up_weight)
    return grad_x, *grad_weights, grad_down


set_gradient(_forward, _backward, of="x gate_weight up_weight down_weight")


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    norm: str,
    eps: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.gated_mlp.gated_mlp`."""
    rate, seed = dropout or (0.0, 0)
    out: Tensor = _forward(x, gate_weight, up_weight, down_weight, keys, norm, eps, rate, seed)[0]
    return out
