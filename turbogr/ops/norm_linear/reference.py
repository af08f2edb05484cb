"""The definition of norm_linear in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.registry import REFERENCE

BACKEND = REFERENCE


def normalize(x: Tensor, norm: str, eps: float) -> Tensor:
    """LayerNorm, RMSNorm or nothing over the last dimension, without parameters."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=eps)
    if norm == "rms":
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    assert norm == "none", norm
    return x


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], norm: str, activation: str, eps: float
) -> list[Tensor]:
    """See `turbogr.ops.norm_linear.norm_linear_pieces`."""
    y = normalize(x, norm, eps) @ weight
    if bias is not None:
        y = y + bias
    assert activation in ("silu", "none"), activation
    return list((F.silu(y) if activation == "silu" else y).split(widths, dim=1))
