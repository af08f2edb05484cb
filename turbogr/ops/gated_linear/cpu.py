"""gated_linear compiled: one kernel if the weight is small, else norm, gate and dropout before the product.

In bf16, on a processor with a unit for it, always the latter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import bf16_products, native, projections
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import DROPOUT, Kernel, dropout_arguments, pointer
from turbogr.ops.norm_linear.cpu import NORMS, is_small, strided_rows
from turbogr.random import Dropout

BACKEND = native.MODEL_BACKEND

_fused_kernel = Kernel(
    "gated_linear",
    "float *x, *gate, *residual, *weight, *bias; int64 *keys; float *out, *moments; "
    f"int64 num_rows, width, columns, x_stride, gate_stride, residual_stride, norm; float eps; {DROPOUT}",
)
_fused_backward_kernel = Kernel(
    "gated_linear_backward",
    "float *grad, *x, *gate, *weight; int64 *keys; float *moments, *grad_x, *grad_gate, *grad_weight, *grad_bias; "
    f"int64 num_rows, width, columns, grad_stride, x_stride, gate_stride, norm; {DROPOUT}",
)
_gate_kernel = Kernel(
    "gate",
    "float *x, *gate; int64 *keys; float *out, *moments; "
    f"int64 num_rows, width, x_stride, gate_stride, norm; float eps; {DROPOUT}",
)
_gate_backward_kernel = Kernel(
    "gate_backward",
    "float *grad, *x, *gate; int64 *keys; float *moments, *grad_x, *grad_gate; "
    f"int64 num_rows, width, x_stride, gate_stride, norm; {DROPOUT}",
)
_gate_bf16_kernel = Kernel(
    "gate_bf16",
    "void *x, *gate; int64 *keys; void *out; float *moments; "
    f"int64 num_rows, width, x_stride, gate_stride, norm; float eps; {DROPOUT}",
)
_gate_backward_bf16_kernel = Kernel(
    "gate_backward_bf16",
    "void *grad, *x, *gate; int64 *keys; float *moments; void *grad_x, *grad_gate; "
    f"int64 num_rows, width, x_stride, gate_stride, norm; {DROPOUT}",
)


def _empty_outputs(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and for the backward the mean and the inverse deviation of each row of x."""
    return residual.new_empty(residual.shape), weight.new_empty(x.shape[0], 2)


def _forward_in_bf16(
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
    """Gated rows are rounded; the result is rounded once."""
    out, moments = _empty_outputs(x, residual, weight)
    gated = _gated(x, gate, keys, moments, norm, eps, rate, seed)
    bf16_products.linear(gated, weight, bias, [out], residual=strided_rows(residual))
    return out, moments


def _gated(
    x: Tensor, gate: Tensor, keys: Tensor | None, moments: Tensor, norm: str, eps: float, rate: float, seed: int
) -> Tensor:
    """dropout(gate * norm(x)); `moments` receives those of the rows."""
    x, gate = strided_rows(x), strided_rows(gate)
    keys = None if keys is None else native.int64(keys)
    gated = x.new_empty(x.shape)
    kernel = _gate_bf16_kernel if x.dtype == torch.bfloat16 else _gate_kernel
    kernel(
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
        *dropout_arguments(rate, seed),
    )
    return gated


@torch_operator("gated_linear", outputs="out moments", fake=_empty_outputs, bf16=_forward_in_bf16)
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
    keys = None if keys is None else native.int64(keys)
    if is_small(weight):
        out, moments = _empty_outputs(x, residual, weight)
        residual, weight = strided_rows(residual), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        _fused_kernel(
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
            *dropout_arguments(rate, seed),
        )
        return out, moments
    moments = x.new_empty(x.shape[0], 2)
    gated = _gated(x, gate, keys, moments, norm, eps, rate, seed)
    out = projections.forward(gated, weight, residual)
    if bias is not None:
        out += bias
    return out, moments


def _empty_gradients(grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate, weight and bias."""
    return (
        x.new_empty(x.shape),
        gate.new_empty(gate.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(grad.shape[1]),
    )


def _backward_in_bf16(
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
    """Gated rows and their gradient are rounded."""
    grad = strided_rows(grad)
    grad_x, grad_gate, grad_weight, _ = _empty_gradients(grad, x, gate, weight)
    gated = bf16_products.multiply(grad, weight.t(), None, x.new_empty(x.shape))
    _through_gate(gated, x, gate, keys, moments, grad_x, grad_gate, norm, rate, seed)
    bf16_products.multiply(gated.t(), grad, None, grad_weight)
    return grad_x, grad_gate, grad_weight, grad.sum(0, dtype=torch.float32)


def _through_gate(
    gated: Tensor,
    x: Tensor,
    gate: Tensor,
    keys: Tensor | None,
    moments: Tensor,
    grad_x: Tensor,
    grad_gate: Tensor,
    norm: str,
    rate: float,
    seed: int,
) -> None:
    """`gated` holds the gradient of the gated rows, and then those rows again."""
    x, gate = strided_rows(x), strided_rows(gate)
    keys = None if keys is None else native.int64(keys)
    kernel = _gate_backward_bf16_kernel if x.dtype == torch.bfloat16 else _gate_backward_kernel
    kernel(
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
        *dropout_arguments(rate, seed),
    )


@torch_operator("gated_linear_backward", fake=_empty_gradients, bf16=_backward_in_bf16)
def _backward(
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
    if is_small(weight):
        grad, weight = strided_rows(grad), weight.contiguous()
        grads = _empty_gradients(grad, x, gate, weight)
        _fused_backward_kernel(
            grad.data_ptr(),
            x.data_ptr(),
            gate.data_ptr(),
            weight.data_ptr(),
            pointer(keys),
            moments.data_ptr(),
            *(gradient.data_ptr() for gradient in grads),
            *x.shape,
            weight.shape[1],
            grad.stride(0),
            x.stride(0),
            gate.stride(0),
            NORMS[norm],
            *dropout_arguments(rate, seed),
        )
        return grads
    grad_x, grad_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    gated = projections.input_gradient(grad, weight)
    _through_gate(gated, x, gate, keys, moments, grad_x, grad_gate, norm, rate, seed)
    return grad_x, grad_gate, projections.weight_gradient(gated, grad, weight), grad.sum(0)


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
