"""The definition of sampled_logits in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.checks import check_index
from turbogr.ops.registry import REFERENCE
from turbogr.ops.sampled_softmax.reference import unit

BACKEND = REFERENCE


def sampled_logits(queries: Tensor, rows: Tensor, index: Tensor, temperature: float, normalize: bool) -> Tensor:
    """See `turbogr.ops.sampled_logits.sampled_logits`."""
    check_index("index", index, rows.shape[0])
    if normalize:
        queries, rows = unit(queries), unit(rows)
    return torch.einsum("td,tnd->tn", queries, F.embedding(index, rows)) / temperature
