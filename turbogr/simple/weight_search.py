"""Weights of a sum of scorers, chosen on the validation items.

With few users the best of many sums on validation is best by luck. So the search starts from a prior in which every
scorer counts by how good it is alone, and adds to it what raises the criterion most, one equal part at a time, as in
Caruana et al., "Ensemble selection from libraries of models" (2004). What it finds is taken only if it is better than
the prior beyond the noise; on small logs the prior stays.

Only items that can matter are compared: of every user the TOP best unseen items of each scorer, and the target.
Positions among them are those among all items unless a sum ranks an item high that no scorer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.evaluation.scorer import Scorer
from turbogr.simple.validation import Block, Validation, gains, standard_error

FloatArray = NDArray[np.float32]

TOP = 200
PRIOR_POWER = 4
"""A scorer's weight in the prior is its criterion to this power."""
PRIOR_PARTS, ADDED_PARTS = 5, 10
"""How many equal parts the prior counts as, and how many are added at most."""
SIGNIFICANT = 3.0
"""Standard errors by which a sum must be better than the prior; it is the best of some dozens that were tried."""
LEAST_SHARE = 0.07
"""A scorer that matters less is left out: it changes little and would be fitted whenever a run is opened."""

_MISSED = 1 << 40


def search_shares(
    scorers: Sequence[Scorer], values: Sequence[float], spreads: Sequence[float], validation: Validation
) -> list[float]:
    """Return the share of every scorer in the chosen sum; 0 for those left out, 1 in all.

    `values` are the criterion of each alone, at least one above 0, and `spreads` what its scores are divided by.
    """
    candidates = _Candidates.of(scorers, spreads, validation)
    prior = (np.asarray(values) / max(values)) ** PRIOR_POWER
    parts = PRIOR_PARTS * prior / prior.sum()
    sums = candidates.sum(parts)
    before, best_gain, best_parts = candidates.gains(sums), 0.0, parts
    for _ in range(ADDED_PARTS):
        tried = [candidates.gains(sums + one) - before for one in candidates.scores]
        added = int(np.argmax([gained.mean() for gained in tried]))
        sums, parts = sums + candidates.scores[added], parts + np.eye(len(parts))[added]
        gain = float(tried[added].mean())
        if gain > max(best_gain, SIGNIFICANT * standard_error(tried[added])):
            best_gain, best_parts = gain, parts
    shares = best_parts / best_parts.sum()
    shares = np.where(shares < min(LEAST_SHARE, shares.max()), 0.0, shares)
    return [float(share) for share in shares / shares.sum()]


@dataclass(frozen=True)
class _Candidates:
    """Scores [n, K] of every scorer for the items of every user that can matter, in the order of their rows.

    Users with fewer items are filled up with -inf. `targets` [n] are the targets' columns; `missed` [n] says which
    targets are no candidates.
    """

    scores: list[FloatArray]
    targets: NDArray[np.int64]
    missed: NDArray[np.bool_]

    @classmethod
    def of(cls, scorers: Sequence[Scorer], spreads: Sequence[float], validation: Validation) -> _Candidates:
        blocks = list(validation.map_blocks(scorers, lambda block: _items_that_matter(block, spreads)))
        widest = max(scores.shape[2] for scores, _, _ in blocks)
        filled = [
            torch.nn.functional.pad(scores, (0, widest - scores.shape[2]), value=-torch.inf) for scores, _, _ in blocks
        ]
        return cls(
            list(torch.cat(filled, dim=1).numpy()),
            torch.cat([targets for _, targets, _ in blocks]).numpy(),
            torch.cat([missed for _, _, missed in blocks]).numpy(),
        )

    def sum(self, parts: NDArray[np.float64]) -> FloatArray:
        total = np.zeros_like(self.scores[0])
        for part, scores in zip(parts, self.scores, strict=True):
            if part > 0:
                total += np.float32(part) * scores
        return total

    def gains(self, sums: FloatArray) -> NDArray[np.float64]:
        """Return what every user adds to the criterion, [n]."""
        wanted = np.take_along_axis(sums, self.targets[:, None], axis=1)
        before = np.arange(sums.shape[1]) < self.targets[:, None]
        better = ((sums > wanted) | ((sums == wanted) & before)).sum(axis=1)
        return gains(np.where(self.missed, _MISSED, better + 1))


def _items_that_matter(block: Block, spreads: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores [m, n, K], the targets' columns [n], and which targets were seen [n]."""
    kept = torch.zeros_like(block.seen)
    for scores in block.scores:
        candidates = scores.masked_fill(block.seen, -torch.inf)
        kept.scatter_(1, candidates.topk(min(TOP, scores.shape[1]), dim=1).indices, True)
    kept &= ~block.seen
    rows = torch.arange(len(kept))
    missed = block.seen[rows, block.targets]
    kept[rows, block.targets] = True
    columns = kept.cumsum(1) - 1
    user, item = kept.nonzero(as_tuple=True)
    found = torch.full((len(block.scores), len(kept), int(kept.sum(1).max())), -torch.inf)
    for index, (scores, spread) in enumerate(zip(block.scores, spreads, strict=True)):
        found[index, user, columns[user, item]] = scores[user, item].float() / spread
    return found, columns[rows, block.targets], missed
