"""The definition of sampled_softmax in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.checks import check_index, check_offsets
from turbogr.ops.registry import REFERENCE

BACKEND = REFERENCE

NORM_EPS = 1e-6


def unit(x: Tensor) -> Tensor:
    """Scale vectors to unit length; a vector shorter than 1e-6 is divided by 1e-6."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=NORM_EPS)


def int8_scale(x: Tensor) -> Tensor:
    """The scale [..., 1] of vectors [..., d] that makes the largest element 127; 1 of a vector of zeros."""
    largest = x.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, torch.ones_like(largest), largest / 127)


def narrowed(x: Tensor, precision: str) -> Tensor:
    """Round vectors [..., d] to fp16, or to 8-bit integers times a scale of the vector; gradients pass unchanged."""
    if precision == "fp32":
        return x
    if precision == "fp16":
        rounded = x.detach().to(torch.float16).to(x.dtype)
    else:
        scale = int8_scale(x.detach())
        rounded = (x.detach() / scale).round() * scale
    return x + (rounded - x.detach())


def sampled_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    temperature: float,
    normalize: bool,
    log_q: Tensor | None,
    groups: Tensor | None,
    precision: str,
    keep: bool = True,
) -> Tensor:
    """See `turbogr.ops.sampled_softmax.sampled_softmax`."""
    check_index("positives", positives, rows.shape[0])
    check_index("negatives", negatives, rows.shape[0])
    if groups is not None:
        check_offsets(groups, queries.shape[0], filled=True)
    if normalize:
        queries, rows = unit(queries), unit(rows)
    if groups is not None:
        negatives = negatives.repeat_interleave(groups.diff(), 0, output_size=queries.shape[0])
    own = (queries * F.embedding(positives, rows)).sum(1) / temperature
    others = torch.einsum("td,tnd->tn", queries, F.embedding(negatives, narrowed(rows, precision))) / temperature
    if log_q is not None:
        own, others = own - log_q[positives], others - log_q[negatives]
    others = others.masked_fill(negatives == positives[:, None], float("-inf"))
    return torch.logsumexp(torch.cat([own[:, None], others], dim=1), dim=1) - own
