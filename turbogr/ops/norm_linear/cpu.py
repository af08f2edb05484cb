"""norm_linear compiled: one kernel if the weight is small, else one before and one after the product.

In bf16, on a processor with a unit for it, always the latter, and the product does what comes after it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from turbogr.ops import bf16_products, native, projections
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import Kernel, pointer

BACKEND = native.MODEL_BACKEND

NORMS = {"none": 0, "layer": 1, "rms": 2}

# A weight of up to this many elements stays in the second-level cache while the rows are read, and everything is done
# block by block of rows. With larger ones little is gained over compiled passes around a product of `projections`.
SMALL_WEIGHT = 2**17

_fused_kernel = Kernel(
    "norm_linear",
    "float *x, *weight, *bias, *before, **outs; int64 *widths, num_pieces, num_rows, width, columns, stride, norm; "
    "float eps; int64 silu",
)
_fused_backward_kernel = Kernel(
    "norm_linear_backward",
    "float **grads; int64 *strides, *widths, num_pieces; float *x, *weight, *before, *grad_x, *grad_weight, "
    "*grad_bias; int64 num_rows, width, columns, stride, norm; float eps; int64 silu",
)
_normalize_kernel = Kernel("normalize", "float *x, *out, *inverses; int64 num_rows, width, stride, norm; float eps")
_normalize_backward_kernel = Kernel(
    "normalize_backward", "float *grad, *normed, *inverses; int64 num_rows, width, norm"
)
_activate_kernel = Kernel("activate", "float *x, **outs; int64 *widths, num_pieces, num_rows, width, silu")
_activate_backward_kernel = Kernel(
    "activate_backward",
    "float *x, **grads; int64 *strides, *widths, num_pieces; float *out; int64 num_rows, width, silu",
)

_normalize_bf16_kernel = Kernel(
    "normalize_bf16", "void *x, *out; float *inverses; int64 num_rows, width, stride, norm; float eps"
)
_normalize_backward_bf16_kernel = Kernel(
    "normalize_backward_bf16", "float *grad; void *normed; float *inverses; void *out; int64 num_rows, width, norm"
)
_activate_backward_bf16_kernel = Kernel(
    "activate_backward_bf16",
    "void *x, **grads; int64 *strides, *widths, num_pieces; void *out; int64 num_rows, width, silu",
)


def is_small(weight: Tensor) -> bool:
    """Whether the weight stays in cache."""
    return weight.numel() <= SMALL_WEIGHT


def strided_rows(x: Tensor) -> Tensor:
    """The matrix itself if each row is contiguous, else a copy in which it is."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _empty_outputs(
    x: Tensor, weight: Tensor, widths: list[int], norm: str, activation: str
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The result's pieces, and for the backward: the product before SiLU, norm(x) and its inverse deviations.

    With a small weight the last two are empty: computing them again is faster than reading them.
    """
    num_rows, width = x.shape
    kept = 0 if norm == "none" or is_small(weight) else num_rows
    return (
        [x.new_empty(num_rows, piece) for piece in widths],
        x.new_empty(num_rows if activation == "silu" else 0, weight.shape[1]),
        x.new_empty(kept, width),
        weight.new_empty(kept),
    )


def _forward_in_bf16(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    outs, before, normed, inverses = _empty_outputs(x, weight, widths, norm, activation)
    x = strided_rows(x)
    if norm == "none":
        left = x
    else:
        left = _normalized(x, *((normed, inverses) if normed.shape[0] else _empty_normed(x)), norm, eps)
    silu = activation == "silu"
    bf16_products.linear(left, weight, bias, outs, before=before if silu else None, silu=silu)
    return outs, before, normed, inverses


@torch_operator("norm_linear", outputs="outs before normed inverses", fake=_empty_outputs, bf16=_forward_in_bf16)
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    outs, before, normed, inverses = _empty_outputs(x, weight, widths, norm, activation)
    x = strided_rows(x)
    if is_small(weight):
        _forward_fused(x, weight, bias, outs, before, norm, activation, eps)
    else:
        left = x if norm == "none" else _normalized(x, normed, inverses, norm, eps)
        _forward_around_gemm(left, weight, bias, outs, before, activation)
    return outs, before, normed, inverses


def _forward_fused(
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
    _fused_kernel(
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
    kernel = _normalize_bf16_kernel if x.dtype == torch.bfloat16 else _normalize_kernel
    kernel(
        x.data_ptr(),
        normed.data_ptr(),
        inverses.data_ptr(),
        *x.shape,
        x.stride(0),
        NORMS[norm],
        eps,
    )
    return normed


def _empty_normed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


def _normalize_any(x: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor]:
    normed, inverses = _empty_normed(x)
    return _normalized(strided_rows(x), normed, inverses, norm, eps), inverses


@torch_operator("normalize", outputs="normed inverses", fake=_empty_normed, bf16=_normalize_any)
def _normalize(x: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor]:
    return _normalize_any(x, norm, eps)


def _through_norm_in_bf16(grad: Tensor, normed: Tensor, inverses: Tensor, norm: str) -> Tensor:
    """The gradient of x in bf16, from that of norm(x) in fp32, which is overwritten."""
    grad_x = torch.empty_like(normed)
    _normalize_backward_bf16_kernel(
        grad.data_ptr(), normed.data_ptr(), inverses.data_ptr(), grad_x.data_ptr(), *grad.shape, NORMS[norm]
    )
    return grad_x


def _normalize_backward_in_bf16(grad: Tensor, normed: Tensor, inverses: Tensor, norm: str) -> Tensor:
    return _through_norm_in_bf16(grad.float().contiguous(), normed, inverses, norm)


@torch_operator("normalize_backward", fake=lambda grad: grad.new_empty(grad.shape), bf16=_normalize_backward_in_bf16)
def _normalize_backward(grad: Tensor, normed: Tensor, inverses: Tensor, norm: str) -> Tensor:
    grad_x = grad.clone(memory_format=torch.contiguous_format)
    _normalize_backward_kernel(grad_x.data_ptr(), normed.data_ptr(), inverses.data_ptr(), *grad_x.shape, NORMS[norm])
    return grad_x


set_gradient(_normalize, _normalize_backward, of="x")


def normalize(x: Tensor, norm: str, eps: float) -> Tensor:
    """LayerNorm, RMSNorm or nothing over the last dimension, without parameters."""
    if norm == "none":
        return x
    normed: Tensor = _normalize(x, norm, eps)[0]
    return normed


def _forward_around_gemm(
    left: Tensor, weight: Tensor, bias: Tensor | None, outs: list[Tensor], before: Tensor, activation: str
) -> None:
    in_place = activation == "none" and len(outs) == 1
    product = (
        outs[0] if in_place else before if activation == "silu" else left.new_empty(left.shape[0], weight.shape[1])
    )
    projections.forward(left, weight, bias, out=product)
    if not in_place:
        addresses, sizes = native.addresses(outs), native.int64s([out.shape[1] for out in outs])
        _activate_kernel(
            product.data_ptr(),
            ctypes.addressof(addresses),
            ctypes.addressof(sizes),
            len(outs),
            *product.shape,
            activation == "silu",
        )


def _empty_gradients(weight: Tensor, left: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        left.new_empty(left.shape[0], weight.shape[0]),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[1] if has_bias else 0),
    )


def _backward_in_bf16(
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
    """Gradients of activations between two products are rounded, and so is norm(x)."""
    only = grads[0]
    if activation == "none" and len(grads) == 1 and only is not None:
        grad = strided_rows(only)
    else:
        grad = _join(grads, widths, before, left, activation)
    left = strided_rows(left)
    if norm != "none" and is_small(weight):
        empty, inverses = _empty_normed(left)
        left = _normalized(left, empty, inverses, norm, eps)
    grad_x, grad_weight, _ = _empty_gradients(weight, left, has_bias)
    bf16_products.multiply(left.t(), grad, None, grad_weight)
    if norm == "none":
        bf16_products.multiply(grad, weight.t(), None, grad_x)
    else:
        wide = bf16_products.multiply(grad, weight.t(), None, weight.new_empty(grad_x.shape))
        grad_x = _through_norm_in_bf16(wide, left, inverses, norm)
    return grad_x, grad_weight, grad.sum(0, dtype=torch.float32) if has_bias else weight.new_empty(0)


@torch_operator("norm_linear_backward", fake=_empty_gradients, bf16=_backward_in_bf16)
def _backward(
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
        return _backward_fused(grads, widths, weight, before, left, has_bias, norm, activation, eps)
    only = grads[0]
    if activation == "none" and len(grads) == 1 and only is not None:
        grad = strided_rows(only)
    else:
        grad = _join(grads, widths, before, left, activation)
    grad_weight = projections.weight_gradient(left, grad, weight)
    grad_x = projections.input_gradient(grad, weight)
    if norm != "none":
        _normalize_backward_kernel(
            grad_x.data_ptr(),
            left.data_ptr(),
            inverses.data_ptr(),
            *grad_x.shape,
            NORMS[norm],
        )
    return grad_x, grad_weight, grad.sum(0) if has_bias else grad.new_empty(0)


def _backward_fused(
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
    grad_x, grad_weight, grad_bias = _empty_gradients(weight, x, has_bias)
    pieces = [None if grad is None else strided_rows(grad) for grad in grads]
    addresses, sizes, strides = native.addresses(pieces), native.int64s(widths), _strides(pieces)
    _fused_backward_kernel(
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
    """Gradient of the product from those of the result's pieces, side by side; None counts as zeros."""
    pieces = [None if grad is None else strided_rows(grad) for grad in grads]
    addresses, sizes, strides = native.addresses(pieces), native.int64s(widths), _strides(pieces)
    out = left.new_empty(left.shape[0], sum(widths))
    kernel = _activate_backward_bf16_kernel if out.dtype == torch.bfloat16 else _activate_backward_kernel
    kernel(
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


def _saved(x: Tensor, weight: Tensor, bias: Tensor | None, norm: str, normed: Tensor) -> dict[str, Tensor | bool]:
    """`left`: the left factor of the product, or x where the backward normalises it again."""
    return {"left": x if norm == "none" or is_small(weight) else normed, "has_bias": bias is not None}


set_gradient(_forward, _backward, of="x weight bias", saved=_saved)


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> list[Tensor]:
    """See `turbogr.ops.norm_linear.norm_linear_pieces`."""
    pieces: list[Tensor] = _forward(x, weight, bias, widths, norm, activation, eps)[0]
    return pieces
