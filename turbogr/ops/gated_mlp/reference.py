"""The definition of gated_mlp in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.norm_linear.reference import normalize
from turbogr.ops.registry import REFERENCE
from turbogr.random import Dropout, apply_dropout

BACKEND = REFERENCE


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
    inner = apply_dropout(normalize(x, norm, eps), dropout, keys)
    return x + (F.silu(inner @ gate_weight) * (inner @ up_weight)) @ down_weight
