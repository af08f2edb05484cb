"""The definition of gated_linear in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops.norm_linear.reference import normalize
from turbogr.ops.registry import REFERENCE
from turbogr.random import Dropout, apply_dropout

BACKEND = REFERENCE


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
    y = residual + apply_dropout(gate * normalize(x, norm, eps), dropout, keys) @ weight
    return y if bias is None else y + bias
