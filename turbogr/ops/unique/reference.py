"""The definition of unique_rows in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def unique_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """See `turbogr.ops.unique.unique_rows`."""
    distinct, index = torch.unique(ids, sorted=True, return_inverse=True)
    return distinct, index
