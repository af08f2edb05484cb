"""The definition of unique_rows in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops.checks import check_index


def unique_rows(pieces: list[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    """See `turbogr.ops.unique.unique_rows`."""
    for ids in pieces:
        check_index("ids", ids, num_rows)
    distinct, index = torch.unique(torch.cat([ids.flatten().to(torch.int64) for ids in pieces]), return_inverse=True)
    return distinct, index.to(torch.int32)
