"""The definition of embed in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.checks import check_index
from turbogr.ops.registry import REFERENCE
from turbogr.random import Dropout, apply_dropout

BACKEND = REFERENCE


def embed(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor,
    positions: Tensor,
    scale: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.embedding.embed`.

    F.embedding rather than indexing: the gradient of `rows[index]` adds up in the order in which threads arrive.
    """
    check_index("index", index, rows.shape[0])
    check_index("positions", positions, position_rows.shape[0])
    return apply_dropout(F.embedding(index, rows) * scale + F.embedding(positions, position_rows), dropout, keys)
