"""norm -> linear -> activation: the projection before attention, in as few passes over memory as the GEMM allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_choice, check_parameters, check_shape

Norm = Literal["layer", "rms", "none"]
Activation = Literal["silu", "none"]


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm, activation: Activation, eps: float = 1e-6
) -> Tensor:
    """Return activation(norm(x) @ weight + bias) for x [T, d], weight [d, out], bias [out]; the norm has no parameters.

    Raises:
        ValueError: shapes that do not fit.
    """
    widths = list(weight.shape[1:])
    (out,) = norm_linear_pieces(x, weight, bias, widths=widths, norm=norm, activation=activation, eps=eps)
    return out


def norm_linear_pieces(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    widths: Sequence[int],
    norm: Norm,
    activation: Activation,
    eps: float = 1e-6,
) -> list[Tensor]:
    """Return the columns of `norm_linear` as tensors [T, width] of their own, for `widths` that add up to `out`.

    Splitting the result would give the same, but then the gradients of the pieces are joined in an extra pass.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("x", x, (None, None))
    check_shape("weight", weight, (x.shape[1], None))
    if bias is not None:
        check_shape("bias", bias, (weight.shape[1],))
    check_parameters(x.dtype, weight=weight, bias=bias)
    check_choice("norm", norm, get_args(Norm))
    check_choice("activation", activation, get_args(Activation))
    if sum(widths) != weight.shape[1]:
        raise ValueError(f"widths {list(widths)} must add up to the {weight.shape[1]} columns of weight")
    function = registry.choose("norm_linear", x.device, x.dtype)
    pieces: list[Tensor] = function(x, weight, bias, list(widths), norm, activation, eps)
    return pieces


registry.register_operator("norm_linear", package=__name__, per_token=True)
