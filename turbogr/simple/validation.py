"""Measuring candidates on some of the validation items, to choose between them.

The criterion is the mean of NDCG@10 and NDCG@100. The first is what lists of ten are measured by; the second varies
less from sample to sample, because more users count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.item_ranking import TILE, Scores, target_positions
from turbogr.evaluation.job_pool import Step, run_jobs
from turbogr.evaluation.scorer import Scorer, batches_of
from turbogr.evaluation.user_histories import StoreHistories
from turbogr.jagged import Jagged

MAX_USERS = 2048
MAX_SCORES = 24_000_000  # scores of one scorer; a large catalogue is measured on fewer users, but at least MIN_USERS
MIN_USERS = 512
_KS = (10, 100)

Found = TypeVar("Found")


class Block(NamedTuple):
    """Some users: the scores [n, V] of every scorer, which items were seen and are left out [n, V], the targets [n]."""

    scores: list[Tensor]
    seen: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Validation:
    """Users whose validation items choose, some of them drawn by a fixed seed; `seen_out`: seen items excluded."""

    store: Store
    held_out: HeldOut
    seen_out: bool
    should_stop: Callable[[], bool] | None = None

    @classmethod
    def of(
        cls, store: Store, split: Split, *, seen_out: bool, should_stop: Callable[[], bool] | None = None
    ) -> Validation:
        most = min(MAX_USERS, max(MIN_USERS, MAX_SCORES // store.num_items))
        return cls(store, HeldOut.of(store, split, "valid").sample(most), seen_out, should_stop)

    def positions(self, scorer: Scorer) -> Int64Array:
        """Return the positions of the validation items, [n]."""

        def work(chosen: slice, step: Step) -> Int64Array:
            return self._positions(scorer.score(self._histories(chosen), step), chosen)

        jobs = batches_of(len(self.held_out), min(256, scorer.batch_size))
        return np.concatenate(list(run_jobs(work, jobs, num_workers=scorer.num_workers, should_stop=self.should_stop)))

    def map_blocks(self, scorers: Sequence[Scorer], work: Callable[[Block], Found]) -> list[Found]:
        """Return what `work` makes of every block of at most TILE users, in their order."""

        def block(chosen: slice, step: Step) -> Found:
            histories = self._histories(chosen)
            scores = [dense(scorer.score(histories, step)).cpu() for scorer in scorers]
            seen = torch.zeros(scores[0].shape, dtype=torch.bool)
            if self.seen_out:
                items, lengths = self.held_out.seen(chosen.start, chosen.stop)
                row = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(lengths))
                seen[row, torch.from_numpy(items)] = True
            return work(Block(scores, seen, torch.from_numpy(self.held_out.targets[chosen])))

        jobs = batches_of(len(self.held_out), TILE)
        num_workers = min(scorer.num_workers for scorer in scorers)
        return list(run_jobs(block, jobs, num_workers=num_workers, should_stop=self.should_stop))

    def size(self, scorer: Scorer) -> float:
        """Return the mean absolute score of some users' items."""
        return self._statistic(scorer, lambda scores: scores.abs().mean())

    def spread(self, scorer: Scorer) -> float:
        """Return the standard deviation of the scores of a user's items, averaged over some users."""
        return self._statistic(scorer, lambda scores: scores.std(dim=1).mean())

    def _statistic(self, scorer: Scorer, statistic: Callable[[Tensor], Tensor]) -> float:
        def work(chosen: slice, step: Step) -> float:
            return float(statistic(dense(scorer.score(self._histories(chosen), step)).cpu().double()))

        # As a job it runs on one thread, so that the digits do not depend on the number of threads.
        jobs = batches_of(min(TILE, len(self.held_out)), TILE)
        (found,) = run_jobs(work, jobs, num_workers=1, should_stop=self.should_stop)
        return found

    def _histories(self, chosen: slice) -> StoreHistories:
        return StoreHistories(self.store, self.held_out.users[chosen], self.held_out.events[chosen])

    def _positions(self, scores: Scores, chosen: slice) -> Int64Array:
        seen = None
        if self.seen_out:
            items, lengths = self.held_out.seen(chosen.start, chosen.stop)
            seen = Jagged.from_lengths(torch.from_numpy(items), torch.from_numpy(lengths))
        targets = torch.from_numpy(self.held_out.targets[chosen])
        found: Int64Array = target_positions(scores, targets.to(scores.device), seen).cpu().numpy()
        return found


def dense(scores: Scores) -> Tensor:
    """Return scores as one tensor [n, V]."""
    tiles = [scores.of(tile, 0, scores.num_items) for tile in range(-(-scores.num_queries // TILE))]
    return torch.cat(tiles)[: scores.num_queries]


def gains(positions: Int64Array) -> NDArray[np.float64]:
    """Return what every user adds to the criterion, [n]."""
    discounted = 1.0 / np.log2(np.minimum(positions, max(_KS)) + 1.0)
    return sum((positions <= k) * discounted for k in _KS) / len(_KS)  # type: ignore[return-value]


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean of `values`; 0 for a single one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def criterion(positions: Int64Array) -> float:
    """Return the mean of NDCG@10 and NDCG@100."""
    return float(gains(positions).mean())


def best_of(values: Mapping[str, float]) -> str:
    """Return the name with the largest value; of equal ones the first."""
    return max(values, key=lambda name: values[name])
