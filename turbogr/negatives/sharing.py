"""Sharing negatives between positions: R drawn for each act like k·R.

Positions share within their sequence, so what they see does not depend on how sequences are grouped into batches or
assigned to ranks. Only `batch` shares among all positions that a rank has, and so depends on both.

- `group`: consecutive positions form groups of k that draw k·R negatives together and are all scored against them.
- `positions`: each position draws R, and takes (k - 1)·R more from those of its sequence's other positions, each
  position its own choice (the paper's formula).
- `batch`: the same with the tokens of any sequence, as the paper's evaluation has it.
- `logits`: the choice of `positions`, but of the other positions' logits as they are (the paper's prose).
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
_CHOICES_AT_ONCE = 2**14  # about 50 bytes each while they are made


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


def choose_others(
    offsets: Tensor, keys: Tensor, num_negatives: int, num_more: int, seed: int, part: slice = slice(None)
) -> Tensor:
    """Choose, for every position of a `part`, `num_more` of the negatives of its sequence's other positions.

    offsets [B + 1] and keys [T] name sequences and positions. Returns [T, num_more] int64 into the negatives
    [T, num_negatives] laid flat; -1 where a sequence has no other position.
    """
    places = torch.arange(*part.indices(keys.numel()), device=keys.device)[:, None]
    sequence = torch.searchsorted(offsets, places, right=True) - 1
    first, length = offsets[sequence], offsets.diff()[sequence]
    own = places - first
    levels = random_integers(keys[part], seed, num_more, LARGEST_BOUND).long()
    chosen = levels * ((length - 1) * num_negatives) // LARGEST_BOUND
    other = (own + 1 + chosen // num_negatives) % length
    return torch.where(length > 1, (first + other) * num_negatives + chosen % num_negatives, -1)


def with_others(negatives: Tensor, positives: Tensor, chosen: Tensor, part: slice = slice(None)) -> Tensor:
    """Append what the positions of a `part` have chosen of all negatives [T, n] to their own; one that is missing
    becomes the positive, which the loss leaves out."""
    taken = negatives.flatten()[chosen.clamp(min=0)]
    return torch.cat([negatives[part], torch.where(chosen < 0, positives[part, None], taken)], dim=1)


class SharedNegatives:
    """[T, num_negatives + num_more]: each position's own negatives and those it takes of others.

    They are chosen for the positions that are asked for, a few at a time, so that they need not all be there at once.
    """

    def __init__(
        self, negatives: Tensor, positives: Tensor, offsets: Tensor, keys: Tensor, num_more: int, seed: int
    ) -> None:
        self.negatives, self.positives, self.offsets, self.keys = negatives, positives, offsets, keys
        self.num_more, self.seed = num_more, seed
        self.shape = negatives.shape[0], negatives.shape[1] + num_more

    def __getitem__(self, part: slice) -> Tensor:
        first, last, _ = part.indices(self.shape[0])
        found = self.negatives.new_empty(max(0, last - first), self.shape[1])
        at_once = max(1, _CHOICES_AT_ONCE // self.shape[1])
        for begin in range(first, last, at_once):
            some = slice(begin, min(begin + at_once, last))
            chosen = choose_others(self.offsets, self.keys, self.negatives.shape[1], self.num_more, self.seed, some)
            found[begin - first : some.stop - first] = with_others(self.negatives, self.positives, chosen, some)
        return found


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
