"""Hard negatives: for every item, the items whose vectors lie closest to its own, looked up now and then."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.config import HARD_DELAY
from turbogr.ops import random_integers
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.random import LARGEST_BOUND, derive_seed

_SITE = 0x4A2D
_MAX_CANDIDATES = 8192
_SCORES_AT_ONCE = 2**24


class HardCache:
    """Lists [V, size] int32: of the candidates, the items closest to each one, itself excepted, closest first.

    Lists are made every `every` steps, at step 0 first, and come into use `HARD_DELAY` steps later; until then the
    lists before them serve, and random ones in the beginning. So batches may be drawn ahead, on another thread, and
    still get the same. The candidates are the whole catalogue, or 8,192 items of it that change every time.
    """

    def __init__(self, num_items: int, size: int, every: int, seed: int) -> None:
        self.every, self.seed = every, derive_seed(seed, _SITE)
        self.size = max(1, min(size, min(num_items, _MAX_CANDIDATES) - 1))
        random = random_integers(torch.arange(num_items), self.seed, self.size, num_items)
        self._lists = torch.stack([random, random])
        self._newest = torch.tensor(-1)

    def lists_for(self, step: int) -> Tensor:
        """Return the lists from which the negatives of a step are drawn."""
        return self._lists[(step - HARD_DELAY) // self.every % 2]

    def is_due(self, step: int) -> bool:
        """Whether lists are to be made from the table as it is before `step` changes it."""
        return step % self.every == 0 and int(self._newest) < step // self.every

    def refresh(self, weight: Tensor, step: int) -> None:
        """Make the lists of a `step` that is due from the whole item table, `weight` [V, d]."""
        num_items, number = weight.shape[0], step // self.every
        candidates = self._candidates(num_items, number).to(weight.device)
        vectors = unit(weight[candidates].detach())
        for rows in torch.arange(num_items, device=weight.device).split(max(1, _SCORES_AT_ONCE // candidates.numel())):
            scores = unit(weight[rows].detach()) @ vectors.T
            scores.masked_fill_(candidates[None, :] == rows[:, None], float("-inf"))
            best = scores.topk(self.size, dim=1).indices
            self._lists[number % 2, rows.cpu()] = candidates[best].to(torch.int32).cpu()
        self._newest.fill_(number)

    def _candidates(self, num_items: int, number: int) -> Tensor:
        if num_items <= _MAX_CANDIDATES:
            return torch.arange(num_items)
        # One of each of as many stretches of the catalogue, which differ by one item at most: all are different, and
        # every item's turn comes.
        bounds = torch.arange(_MAX_CANDIDATES + 1) * num_items // _MAX_CANDIDATES
        drawn = random_integers(torch.arange(_MAX_CANDIDATES), derive_seed(self.seed, number), 1, LARGEST_BOUND)[:, 0]
        return bounds[:-1] + drawn.long() * bounds.diff() // LARGEST_BOUND

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, to be loaded in place."""
        return {"lists": self._lists, "newest": self._newest}
