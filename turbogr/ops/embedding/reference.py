"""The definition of embed in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from turbogr.random import Dropout, apply_dropout


def embed(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor,
    positions: Tensor,
    scale: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.embedding.embed`."""
    return apply_dropout(rows[index] * scale + position_rows[positions], dropout, keys)
