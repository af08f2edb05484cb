"""norm -> gate -> dropout -> linear -> residual: the projection after attention."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_choice, check_dtypes, check_keys, check_parameters, check_shape
from turbogr.ops.norm_linear import Norm
from turbogr.random import Dropout


def gated_linear(
    x: Tensor,
    gate: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm,
    eps: float = 1e-6,
    dropout: Dropout | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Return residual + dropout(gate * norm(x)) @ weight + bias.

    x and gate [T, w] (rows may be strided), residual [T, d], weight [w, d], bias [d]; `keys` [T] int64 name
    the rows for dropout.

    Raises:
        ValueError: shapes that do not fit, or dropout without keys.
    """
    check_shape("x", x, (None, None))
    check_shape("gate", gate, tuple(x.shape))
    check_shape("weight", weight, (x.shape[1], None))
    check_shape("residual", residual, (x.shape[0], weight.shape[1]))
    if bias is not None:
        check_shape("bias", bias, (weight.shape[1],))
    check_dtypes(x.dtype, gate=gate, residual=residual)
    check_parameters(x.dtype, weight=weight, bias=bias)
    check_choice("norm", norm, get_args(Norm))
    if dropout is not None:
        check_keys(keys, x.shape[0])
    function = registry.choose("gated_linear", x.device, x.dtype)
    out: Tensor = function(x, gate, residual, weight, bias, norm, eps, dropout, keys)
    return out


registry.register_operator("gated_linear", package=__name__, per_token=True)
