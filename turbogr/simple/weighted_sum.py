"""A weighted sum of the scores of several scorers, which is a scorer again.

Scores of simple methods are like counts: a few are far larger than all others and would decide alone. They may be
compressed before they are summed: asinh(score / scale), about a logarithm for large scores, and the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr.evaluation.item_ranking import Scores
from turbogr.evaluation.scorer import Scorer, Step
from turbogr.evaluation.user_histories import UserHistories


@dataclass(frozen=True)
class WeightedSum:
    """Scorers of the same items with their weights, and by which scale each is compressed (None: not at all)."""

    scorers: Sequence[Scorer]
    weights: Sequence[float]
    scales: Sequence[float | None]

    @property
    def num_items(self) -> int:
        return self.scorers[0].num_items

    @property
    def num_workers(self) -> int:
        return min(scorer.num_workers for scorer in self.scorers)

    @property
    def batch_size(self) -> int:
        return min(scorer.batch_size for scorer in self.scorers)

    def score(self, histories: UserHistories, step: Step) -> Scores:
        first, *others = self.scorers
        # A user is done once, however many scorers there are; the others only may stop the work.
        found = [first.score(histories, step), *(other.score(histories, lambda _: step(0)) for other in others)]
        return _SummedScores(found, self.weights, self.scales)


class _SummedScores:
    """The weighted sum of scores of the same queries."""

    def __init__(self, parts: Sequence[Scores], weights: Sequence[float], scales: Sequence[float | None]) -> None:
        first = parts[0]
        self.num_queries, self.num_items = first.num_queries, first.num_items
        self.device, self.dtype = first.device, functools.reduce(torch.promote_types, [part.dtype for part in parts])
        self._parts, self._weights, self._scales = parts, weights, scales

    def of(self, tile: int, start: int, stop: int) -> Tensor:
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for part, weight, scale in zip(self._parts, self._weights, self._scales, strict=True):
            total = total + weight * compressed(part.of(tile, start, stop), scale).to(self.device)
        return total


def compressed(scores: Tensor, scale: float | None) -> Tensor:
    """Return asinh(score / scale), or the scores where the scale is None."""
    return scores if scale is None else (scores / scale).asinh()
