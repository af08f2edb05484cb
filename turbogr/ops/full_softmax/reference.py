"""The definition of full_softmax in plain PyTorch; many positions are computed in portions, twice in the backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from turbogr.ops.checks import check_index
from turbogr.ops.registry import REFERENCE
from turbogr.ops.sampled_softmax.reference import unit

BACKEND = REFERENCE

# Logits of a portion of positions: 512 MB in fp32.
_LOGITS_AT_ONCE = 2**27


def full_softmax(queries: Tensor, rows: Tensor, targets: Tensor, temperature: float, normalize: bool) -> Tensor:
    """See `turbogr.ops.full_softmax.full_softmax`."""
    check_index("targets", targets, rows.shape[0])
    if normalize:
        queries, rows = unit(queries), unit(rows)

    def portion(queries: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(queries @ rows.T / temperature, targets.long(), reduction="none")

    size = max(1, _LOGITS_AT_ONCE // max(1, rows.shape[0]))
    if queries.shape[0] <= size:
        return portion(queries, rows, targets)
    parts = zip(queries.split(size), targets.split(size), strict=True)
    losses = [checkpoint(portion, q, rows, t, use_reentrant=False, preserve_rng_state=False) for q, t in parts]
    return torch.cat(losses)
