"""A weighted sum of the scores of several scorers, which is a scorer again."""

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
    """Scorers of the same items with their weights; the first one's users and threads are counted."""

    scorers: Sequence[Scorer]
    weights: Sequence[float]

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
        return _SummedScores(found, self.weights)


class _SummedScores:
    """The weighted sum of scores of the same queries."""

    def __init__(self, parts: Sequence[Scores], weights: Sequence[float]) -> None:
        first = parts[0]
        self.num_queries, self.num_items = first.num_queries, first.num_items
        self.device, self.dtype = first.device, functools.reduce(torch.promote_types, [part.dtype for part in parts])
        self._parts, self._weights = parts, weights

    def of(self, tile: int, start: int, stop: int) -> Tensor:
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for part, weight in zip(self._parts, self._weights, strict=True):
            total = total + weight * part.of(tile, start, stop).to(self.device)
        return total
