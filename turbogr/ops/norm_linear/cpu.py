"""norm_linear compiled: all in one with a small weight, else passes around PyTorch's GEMM, one before and one after."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel, pointer

NORMS = {"none": 0, "layer": 1, "rms": 2}

# A weight of up to this many elements stays in the second-level cache while the rows go by, and everything is done
# block by block of rows. With larger ones little is gained over compiled passes around PyTorch's GEMM.
SMALL_WEIGHT = 2**17

_norm_linear_small = Kernel("norm_linear", "ppppppiiiiiifi")
_norm_linear_small_backward = Kernel("norm_linear_backward", "pppippppppiiiiifi")
_normalize = Kernel("normalize", "pppiiiif")
_normalize_backward = Kernel("normalize_backward", "pppiii")
_activate = Kernel("activate", "pppiiii")
_activate_backward = Kernel("activate_backward", "ppppipiii")


def is_small(weight: Tensor) -> bool:
    """Whether the weight stays in cache."""
    return weight.numel() <= SMALL_WEIGHT


def strided_rows(x: Tensor) -> Tensor:
    """The matrix itself when each row lies together, else a copy in which it does."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    outs, before, normed, inverses = _outputs(x, weight, widths, norm, activation)
    x = strided_rows(x)
    if is_small(weight):
        _multiply_small(x, weight, bias, outs, before, norm, activation, eps)
    else:
        left = x if norm == "none" else _normalized(x, normed, inverses, norm, eps)
        _multiply(left, weight, bias, outs, before, activation)
    return outs, before, normed, inverses


def _multiply_small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outs: list[Tensor],
    before: Tensor,
    norm: str,
    activation: str,
    eps: float,
) -> None:
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    addresses, sizes = native.addresses(outs), native.int64s([out.shape[1] for out in outs])
    _norm_linear_small(
        x.data_ptr(),
        weight.data_ptr(),
        pointer(bias),
        before.data_ptr(),
        ctypes.addressof(addresses),
        ctypes.addressof(sizes),
        len(outs),
        *x.shape,
        weight.shape[1],
        x.stride(0),
        NORMS[norm],
        eps,
        activation == "silu",
    )


def _normalized(x: Tensor, normed: Tensor, inverses: Tensor, norm: str, eps: float) -> Tensor:
    _normalize(
        x.data_ptr(),
        normed.data_ptr(),
        inverses.data_ptr(),
        *x.shape,
        x.stride(0),
        NORMS[norm],
        eps,
    )
    return normed


def _multiply(
    left: Tensor, weight: Tensor, bias: Tensor | None, outs: list[Tensor], before: Tensor, activation: str
) -> None:
    whole = activation == "none" and len(outs) == 1
    product = outs[0] if whole else before if activation == "silu" else left.new_empty(left.shape[0], weight.shape[1])
    if bias is None:
        torch.mm(left, weight, out=product)
    else:
        torch.addmm(bias, left, weight, out=product)
    if not whole:
        addresses, sizes = native.addresses(outs), native.int64s([out.shape[1] for out in outs])
        _activate(
            product.data_ptr(),
            ctypes.addressof(addresses),
            ctypes.addressof(sizes),
            len(outs),
            *product.shape,
            activation == "silu",
        )


def _outputs(
    x: Tensor, weight: Tensor, widths: list[int], norm: str, activation: str
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The result's pieces, and for the backward: the product before SiLU, norm(x) and its inverse deviations.

    With a small weight the last two are empty: to compute them again is faster than to read them.
    """
    num_rows, width = x.shape
    kept = 0 if norm == "none" or is_small(weight) else num_rows
    return (
        [x.new_empty(num_rows, piece) for piece in widths],
        x.new_empty(num_rows if activation == "silu" else 0, weight.shape[1]),
        x.new_empty(kept, width),
        x.new_empty(kept),
    )


def _gradients(
    grads: list[Tensor | None],
    widths: list[int],
    weight: Tensor,
    before: Tensor,
    left: Tensor,
    inverses: Tensor,
    has_bias: bool,
    norm: str,
    activation: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if is_small(weight):
        return _gradients_small(grads, widths, weight, before, left, has_bias, norm, activation, eps)
    only = grads[0]
    if activation == "none" and len(grads) == 1 and only is not None:
        grad = strided_rows(only)
    else:
        grad = _join(grads, widths, before, left, activation)
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
    return grad_x, grad_weight, grad.sum(0) if has_bias else grad.new_empty(0)


def _gradients_small(
    grads: list[Tensor | None],
    widths: list[int],
    weight: Tensor,
    before: Tensor,
    x: Tensor,
    has_bias: bool,
    norm: str,
    activation: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = strided_rows(x), weight.contiguous()
    grad_x, grad_weight, grad_bias = _gradient_outputs(weight, x, has_bias)
    pieces = [None if grad is None else strided_rows(grad) for grad in grads]
    addresses, sizes, strides = native.addresses(pieces), native.int64s(widths), _strides(pieces)
    _norm_linear_small_backward(
        ctypes.addressof(addresses),
        ctypes.addressof(strides),
        ctypes.addressof(sizes),
        len(widths),
        x.data_ptr(),
        weight.data_ptr(),
        before.data_ptr(),
        grad_x.data_ptr(),
        grad_weight.data_ptr(),
        grad_bias.data_ptr() if has_bias else None,
        *x.shape,
        weight.shape[1],
        x.stride(0),
        NORMS[norm],
        eps,
        activation == "silu",
    )
    return grad_x, grad_weight, grad_bias


def _join(grads: list[Tensor | None], widths: list[int], before: Tensor, left: Tensor, activation: str) -> Tensor:
    """Gradient of the product from those of the result's pieces, which lie side by side; None is zeros."""
    pieces = [None if grad is None else strided_rows(grad) for grad in grads]
    addresses, sizes, strides = native.addresses(pieces), native.int64s(widths), _strides(pieces)
    out = left.new_empty(left.shape[0], sum(widths))
    _activate_backward(
        before.data_ptr(),
        ctypes.addressof(addresses),
        ctypes.addressof(strides),
        ctypes.addressof(sizes),
        len(widths),
        out.data_ptr(),
        *out.shape,
        activation == "silu",
    )
    return out


def _strides(pieces: list[Tensor | None]) -> ctypes.Array[ctypes.c_int64]:
    return native.int64s([0 if piece is None else piece.stride(0) for piece in pieces])


def _gradient_outputs(weight: Tensor, left: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        left.new_empty(left.shape[0], weight.shape[0]),
        weight.new_empty(weight.shape),
        left.new_empty(weight.shape[1] if has_bias else 0),
    )


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    return _outputs(x, weight, widths, norm, activation)


def _fake_gradients(
    grads: list[Tensor | None],
    widths: list[int],
    weight: Tensor,
    before: Tensor,
    left: Tensor,
    inverses: Tensor,
    has_bias: bool,
    *args: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradient_outputs(weight, left, has_bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, bias, ctx.widths, ctx.norm, ctx.activation, ctx.eps = inputs
    _, before, normed, inverses = output
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(before, normed, inverses)
    ctx.set_materialize_grads(False)
    left = x if ctx.norm == "none" or is_small(weight) else normed
    ctx.save_for_backward(weight, before, left, inverses)


def _differentiate(ctx: Any, grads: list[Tensor | None] | None, *unused: Tensor | None) -> tuple[Any, ...]:
    if grads is None or all(grad is None for grad in grads):
        return (None,) * 7
    grad_x, grad_weight, grad_bias = torch.ops.turbogr.norm_linear_backward(
        grads, ctx.widths, *ctx.saved_tensors, ctx.has_bias, ctx.norm, ctx.activation, ctx.eps
    )
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None, None, None, None


native.define(
    "norm_linear(Tensor x, Tensor weight, Tensor? bias, int[] widths, str norm, str activation, float eps) "
    "-> (Tensor[], Tensor, Tensor, Tensor)",
    _norm_linear,
    _fake,
    backward=_differentiate,
    setup_context=_save,
)
native.define(
    "norm_linear_backward(Tensor?[] grads, int[] widths, Tensor weight, Tensor before, Tensor left, Tensor inverses, "
    "bool has_bias, str norm, str activation, float eps) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> list[Tensor]:
    """See `turbogr.ops.norm_linear.norm_linear_pieces`."""
    pieces: list[Tensor] = torch.ops.turbogr.norm_linear(x, weight, bias, widths, norm, activation, eps)[0]
    return pieces
