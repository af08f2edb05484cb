"""norm_linear around the library's matrix product: a pass before it (norm) and one after it (bias and SiLU).

Between forward and backward x, two moments per row and the product before SiLU are kept. The backward makes norm(x)
again, in the pass that makes the gradient of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import triton_passes, triton_runtime
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.norm_linear.cpu import strided_rows
from turbogr.ops.triton_passes import column_sums, empty_moments, weight_gradient, weight_like
from turbogr.ops.triton_runtime import DEVICES

BACKEND = triton_runtime.BACKEND


def _empty_outputs(
    x: Tensor, weight: Tensor, widths: list[int], norm: str, activation: str
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The result's pieces, and for the backward: the product before bias and SiLU, and the moments of the rows."""
    return (
        [x.new_empty(x.shape[0], piece) for piece in widths],
        x.new_empty(x.shape[0] if activation == "silu" else 0, weight.shape[1]),
        empty_moments(x, norm),
    )


@torch_operator("norm_linear_triton", outputs="outs before moments", fake=_empty_outputs, device=DEVICES)
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    outs, before, moments = _empty_outputs(x, weight, widths, norm, activation)
    left, silu = strided_rows(x), activation == "silu"
    if norm != "none":
        left, moments = triton_passes.normalize(left, None, norm, eps)
    if silu:
        product = torch.mm(left, weight_like(weight, x), out=before)
    elif len(outs) == 1 and bias is None:
        torch.mm(left, weight_like(weight, x), out=outs[0])
        return outs, before, moments
    else:
        product = left @ weight_like(weight, x)
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    for out, part, part_bias in zip(outs, product.split(widths, dim=1), biases, strict=True):
        triton_passes.activate(part, part_bias, out, silu=silu)
    return outs, before, moments


def _empty_gradients(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(0 if bias is None else bias.shape)


@torch_operator("norm_linear_triton_backward", fake=_empty_gradients, device=DEVICES)
def _backward(
    grads: list[Tensor | None],
    widths: list[int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor,
    moments: Tensor,
    norm: str,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    only = grads[0]
    if activation == "none" and len(grads) == 1 and only is not None:
        grad = strided_rows(only)
    else:
        grad = _join(grads, widths, x, before, bias, activation)
    left = strided_rows(x)
    grad_x = grad @ weight_like(weight, x).T
    if norm != "none":
        grad_x, _, left = triton_passes.normalize_backward(grad_x, left, None, moments, norm)
    grad_bias = weight.new_empty(0) if bias is None else column_sums(grad, bias)
    return grad_x, weight_gradient(left, grad, weight), grad_bias


def _join(
    grads: list[Tensor | None], widths: list[int], x: Tensor, before: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """Gradient of the product from those of the result's pieces, side by side; None counts as zeros."""
    out, silu = x.new_empty(x.shape[0], sum(widths)), activation == "silu"
    befores = (before if silu else out).split(widths, dim=1)
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    parts = zip(grads, befores, biases, out.split(widths, dim=1), strict=True)
    for grad, part_before, part_bias, part in parts:
        if grad is None:
            part.zero_()
        else:
            triton_passes.activate_backward(strided_rows(grad), part_before, part_bias, part, silu=silu)
    return out


set_gradient(_forward, _backward, of="x weight bias")


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> list[Tensor]:
    """See `turbogr.ops.norm_linear.norm_linear_pieces`."""
    pieces: list[Tensor] = _forward(x, weight, bias, widths, norm, activation, eps)[0]
    return pieces
