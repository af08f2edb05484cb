"""The definition of look_up_rows in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.checks import check_index
from turbogr.ops.registry import REFERENCE

BACKEND = REFERENCE


def look_up_rows(rows: Tensor, index: Tensor, counts: list[int]) -> list[Tensor]:
    """See `turbogr.ops.look_up.look_up_rows`.

    F.embedding rather than indexing: the gradient of `rows[index]` adds up in the order in which threads arrive.
    """
    check_index("index", index, rows.shape[0])
    return list(F.embedding(index, rows).split(counts))
