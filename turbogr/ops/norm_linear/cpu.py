"""norm_linear on compiled passes around PyTorch's GEMM: one pass before it and one after, forward and backward."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel

NORMS = {"none": 0, "layer": 1, "rms": 2}

_normalize = Kernel("normalize", "pppiiiif")
_normalize_backward = Kernel("normalize_backward", "pppiii")
_silu = Kernel("silu", "ppi")
_silu_backward = Kernel("silu_backward", "ppppipii")


def strided_rows(x: Tensor) -> Tensor:
    """The matrix itself when each row lies together, else a copy in which it does."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: str, activation: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, before, normed, inverses = _outputs(x, weight, norm, activation)
    x = strided_rows(x)
    if norm != "none":
        _normalize(
            x.data_ptr(),
            normed.data_ptr(),
            inverses.data_ptr(),
            *x.shape,
            x.stride(0),
            NORMS[norm],
            eps,
        )
    product = before if activation == "silu" else out
    left = x if norm == "none" else normed
    if bias is None:
        torch.mm(left, weight, out=product)
    else:
        torch.addmm(bias, left, weight, out=product)
    if activation == "silu":
        _silu(before.data_ptr(), out.data_ptr(), out.numel())
    return out, before, normed, inverses


def _outputs(x: Tensor, weight: Tensor, norm: str, activation: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and for the backward: the product before the activation, norm(x) and its inverse deviations."""
    num_rows, width = x.shape
    kept = num_rows if norm != "none" else 0
    return (
        x.new_empty(num_rows, weight.shape[1]),
        x.new_empty(num_rows if activation == "silu" else 0, weight.shape[1]),
        x.new_empty(kept, width),
        x.new_empty(kept),
    )


def _gradients(
    grad: Tensor, weight: Tensor, before: Tensor, left: Tensor, inverses: Tensor, norm: str, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    if activation == "silu":
        grad = _through_silu([grad], before)
    grad_weight = torch.mm(left.t(), grad)
    grad_x = torch.mm(grad, weight.t())
    if norm != "none":
        _normalize_backward(
            grad_x.data_ptr(),
            left.data_ptr(),
            inverses.data_ptr(),
            *grad_x.shape,
            NORMS[norm],
        )
    return grad_x, grad_weight, grad.sum(0)


def _through_silu(grads: list[Tensor], before: Tensor) -> Tensor:
    """Gradient of the product from those of the result's pieces, which lie side by side."""
    grads = [strided_rows(grad) for grad in grads]
    pointers = (ctypes.c_void_p * len(grads))(*(grad.data_ptr() for grad in grads))
    strides = (ctypes.c_int64 * len(grads))(*(grad.stride(0) for grad in grads))
    widths = (ctypes.c_int64 * len(grads))(*(grad.shape[1] for grad in grads))
    out = torch.empty_like(before)
    _silu_backward(
        before.data_ptr(),
        ctypes.addressof(pointers),
        ctypes.addressof(strides),
        ctypes.addressof(widths),
        len(grads),
        out.data_ptr(),
        *out.shape,
    )
    return out


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: str, activation: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, weight, norm, activation)


def _fake_gradients(grad: Tensor, weight: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    return (
        grad.new_empty(grad.shape[0], weight.shape[0]),
        weight.new_empty(weight.shape),
        grad.new_empty(grad.shape[1]),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.norm, ctx.activation, _ = inputs
    _, before, normed, inverses = output
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(before, normed, inverses)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, before, x if ctx.norm == "none" else normed, inverses)


def _differentiate(ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 6
    grad_x, grad_weight, grad_bias = torch.ops.turbogr.norm_linear_backward(
        grad, *ctx.saved_tensors, ctx.norm, ctx.activation
    )
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None, None, None


native.define(
    "norm_linear(Tensor x, Tensor weight, Tensor? bias, str norm, str activation, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _norm_linear,
    _fake,
    backward=_differentiate,
    setup_context=_save,
)
native.define(
    "norm_linear_backward(Tensor grad, Tensor weight, Tensor before, Tensor left, Tensor inverses, str norm, "
    "str activation) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


def norm_linear(x: Tensor, weight: Tensor, bias: Tensor | None, norm: str, activation: str, eps: float) -> Tensor:
    """See `turbogr.ops.norm_linear.norm_linear`."""
    out: Tensor = torch.ops.turbogr.norm_linear(x, weight, bias, norm, activation, eps)[0]
    return out
