"""The definition of sampled_softmax in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NORM_EPS = 1e-6


def unit(x: Tensor) -> Tensor:
    """Scale vectors to unit length; a vector shorter than 1e-6 is divided by 1e-6."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=NORM_EPS)


def sampled_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    temperature: float,
    normalize: bool,
    log_q: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.sampled_softmax.sampled_softmax`."""
    if normalize:
        queries, rows = unit(queries), unit(rows)
    candidates = torch.cat([positives[:, None], negatives], dim=1)
    logits = torch.einsum("td,tnd->tn", queries, F.embedding(candidates, rows)) / temperature
    if log_q is not None:
        logits = logits - log_q[candidates]
    hits = torch.zeros_like(candidates, dtype=torch.bool)
    hits[:, 1:] = negatives == positives[:, None]
    logits = logits.masked_fill(hits, float("-inf"))
    return torch.logsumexp(logits, dim=1) - logits[:, 0]
