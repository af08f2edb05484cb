"""norm -> dropout -> gated hidden layer -> residual: the feed-forward part of a block."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_choice, check_keys, check_parameters, check_shape
from turbogr.ops.norm_linear import Norm
from turbogr.random import Dropout


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    norm: Norm,
    eps: float = 1e-6,
    dropout: Dropout | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Return x + (SiLU(n @ gate_weight) * (n @ up_weight)) @ down_weight with n = dropout(norm(x)).

    x [T, d] (rows may be strided), gate_weight and up_weight [d, f], down_weight [f, d]; `keys` [T] int64 name the rows
    for dropout.

    Raises:
        ValueError: shapes that do not fit, or dropout without keys.
    """
    check_shape("x", x, (None, None))
    check_shape("gate_weight", gate_weight, (x.shape[1], None))
    check_shape("up_weight", up_weight, tuple(gate_weight.shape))
    check_shape("down_weight", down_weight, (gate_weight.shape[1], x.shape[1]))
    check_parameters(x.dtype, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    check_choice("norm", norm, get_args(Norm))
    if dropout is not None:
        check_keys(keys, x.shape[0])
    function = registry.choose("gated_mlp", x.device, x.dtype)
    out: Tensor = function(x, gate_weight, up_weight, down_weight, norm, eps, dropout, keys)
    return out


registry.register_operator("gated_mlp", package=__name__, per_token=True)
