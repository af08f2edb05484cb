"""Sharing negatives between positions: R drawn for each act like k·R.

Positions share within their sequence, so what they see does not depend on how sequences are grouped into batches or
dealt out to ranks.

- `group`: consecutive positions form groups of k that draw k·R negatives together and are all scored against them.
- `positions`: each position draws R, and takes (k - 1)·R more from those of its sequence's other positions, each
  position its own choice (the paper's formula).
- `logits`: the same choice, but what is taken are the other positions' logits as they are (the paper's prose).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from turbogr.ops import random_integers
from turbogr.ops.sampled_softmax import Precision
from turbogr.ops.sampled_softmax.reference import narrowed, unit
from turbogr.random import LARGEST_BOUND, derive_seed

_POSITIONS_AT_ONCE = 1024


def group_offsets(offsets: Tensor, size: int) -> Tensor:
    """Cut the sequences of `offsets` [B + 1] into groups of `size` positions, the last one of each maybe smaller.

    Returns the groups' offsets [G + 1] int64.
    """
    lengths = offsets.diff()
    counts = (lengths + size - 1) // size
    firsts = counts.cumsum(0) - counts
    number = torch.arange(int(counts.sum()), device=offsets.device) - firsts.repeat_interleave(counts)
    return torch.cat([offsets[:-1].repeat_interleave(counts) + number * size, offsets[-1:]])


def group_anchors(groups: Tensor, size: int, targets: Tensor) -> Tensor:
    """Targets of each group's positions, [G, size], taken in turn where a group has fewer."""
    turn = torch.arange(size, device=groups.device)[None, :] % groups.diff()[:, None]
    return targets[groups[:-1, None] + turn]


def choose_others(offsets: Tensor, keys: Tensor, num_negatives: int, num_more: int, seed: int) -> Tensor:
    """Choose, for every position, `num_more` of the negatives of its sequence's other positions.

    offsets [B + 1] and keys [T] name sequences and positions. Returns [T, num_more] int64 into the negatives
    [T, num_negatives] laid flat; -1 where a sequence has no other position.
    """
    lengths = offsets.diff()
    length = lengths.repeat_interleave(lengths)[:, None]
    first = offsets[:-1].repeat_interleave(lengths)[:, None]
    own = torch.arange(keys.numel(), device=keys.device)[:, None] - first
    levels = random_integers(keys, seed, num_more, LARGEST_BOUND).long()
    chosen = levels * ((length - 1) * num_negatives) // LARGEST_BOUND
    other = (own + 1 + chosen // num_negatives) % length
    return torch.where(length > 1, (first + other) * num_negatives + chosen % num_negatives, -1)


def with_others(negatives: Tensor, positives: Tensor, chosen: Tensor) -> Tensor:
    """Append the chosen negatives to each position's own [T, n]; one that is missing becomes the positive, which the
    loss leaves out."""
    taken = negatives.flatten()[chosen.clamp(min=0)]
    return torch.cat([negatives, torch.where(chosen < 0, positives[:, None], taken)], dim=1)


def reused_logits_loss(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    chosen: Tensor,
    *,
    temperature: float,
    log_q: Tensor | None,
    precision: Precision,
) -> Tensor:
    """Return the loss [T] of positions that also count the `chosen` logits of others, as those have them.

    Arguments as those of `sampled_softmax` and the result of `choose_others`. An ablation in plain PyTorch.
    """
    queries, units = unit(queries), unit(rows)
    narrow = narrowed(units, precision)

    def score(queries: Tensor, negatives: Tensor, narrow: Tensor) -> Tensor:
        return torch.einsum("td,tnd->tn", queries, torch.nn.functional.embedding(negatives, narrow))

    parts = zip(queries.split(_POSITIONS_AT_ONCE), negatives.split(_POSITIONS_AT_ONCE), strict=True)
    others = torch.cat([checkpoint(score, q, n, narrow, use_reentrant=False) for q, n in parts]) / temperature
    own = (queries * torch.nn.functional.embedding(positives, units)).sum(1, keepdim=True) / temperature
    if log_q is not None:
        own, others = own - log_q[positives][:, None], others - log_q[negatives]
    ids = with_others(negatives, positives, chosen)
    logits = torch.cat([others, others.flatten()[chosen.clamp(min=0)]], dim=1)
    logits = logits.masked_fill(ids == positives[:, None], float("-inf"))
    return torch.logsumexp(torch.cat([own, logits], dim=1), dim=1) - own[:, 0]


def sharing_seed(seed: int, step: int) -> int:
    """The seed of `choose_others` at a step."""
    return derive_seed(seed, 0x5AA2E, step)
