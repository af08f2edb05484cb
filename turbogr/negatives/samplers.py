"""Samplers draw negatives for real positions only, as a function of (seed, step, event).

The draw depends on nothing else: not on the number of threads, the grouping into batches or the number of processes.
A sampler that is not uniform tells with which probability it draws an item, for the correction of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.config import LossConfig
from turbogr.negatives.alias import AliasTable
from turbogr.negatives.hard import HardCache
from turbogr.ops import random_integers
from turbogr.random import derive_seed

_SITE = 0x5E6A

Counts = Callable[[], NDArray[np.int64]]
"""How often each item occurs in the training events, [V]; called only if a sampler needs it."""


@dataclass(frozen=True)
class Request:
    """N draws to be made at a step.

    `keys` [N] int64 name them; `anchors` [N, a] are the targets of the positions that will use them, `batch` [S] those
    of the whole step, on all ranks.
    """

    keys: Tensor
    step: int
    anchors: Tensor
    batch: Tensor


class Sampler(Protocol):
    """Draws item rows that serve as negatives."""

    def draw(self, request: Request, num_negatives: int) -> Tensor:
        """Return negatives [N, num_negatives] int32."""
        ...

    def probabilities(self, num_negatives: int) -> Tensor | None:
        """Return the probability of every item, [V] fp64, among so many that are drawn together.

        None where the sampler is not to be corrected for.
        """
        ...


class UniformSampler:
    """Every item of the catalogue is equally likely, with replacement."""

    def __init__(self, num_items: int, seed: int) -> None:
        self.num_items, self.seed = num_items, derive_seed(seed, _SITE)

    def draw(self, request: Request, num_negatives: int) -> Tensor:
        return random_integers(request.keys, derive_seed(self.seed, request.step), num_negatives, self.num_items)

    def probabilities(self, num_negatives: int) -> Tensor:
        return torch.full((self.num_items,), 1 / self.num_items, dtype=torch.float64)


class PopularitySampler:
    """Items are drawn in proportion to a power of how often they occur in the training events, at least once."""

    def __init__(self, counts: NDArray[np.int64], exponent: float, seed: int) -> None:
        weights = np.maximum(counts, 1).astype(np.float64) ** exponent
        self.weights, self.table = weights, AliasTable.of(weights)
        self.seed = derive_seed(seed, _SITE, 1)

    def draw(self, request: Request, num_negatives: int) -> Tensor:
        return self.table.draw(request.keys, derive_seed(self.seed, request.step), num_negatives)

    def probabilities(self, num_negatives: int) -> Tensor:
        return torch.from_numpy(self.weights / self.weights.sum())


class InBatchSampler:
    """Targets of the step's other positions, each equally likely: over many steps, items by their popularity.

    A position may draw its own target, which the loss leaves out.
    """

    def __init__(self, counts: NDArray[np.int64], seed: int) -> None:
        self.counts, self.seed = np.maximum(counts, 1).astype(np.float64), derive_seed(seed, _SITE, 2)

    def draw(self, request: Request, num_negatives: int) -> Tensor:
        shape = request.keys.numel(), num_negatives
        if not request.keys.numel():
            return request.keys.new_empty(shape, dtype=torch.int32)
        seed = derive_seed(self.seed, request.step)
        places = random_integers(request.keys, seed, num_negatives, request.batch.numel())
        return request.batch.to(torch.int32).index_select(0, places.flatten()).view(shape)

    def probabilities(self, num_negatives: int) -> Tensor:
        return torch.from_numpy(self.counts / self.counts.sum())


class HardSampler:
    """Items that lie close to the position's target, from the cache's lists; they are meant to be drawn too often."""

    def __init__(self, cache: HardCache, seed: int) -> None:
        self.cache, self.seed = cache, derive_seed(seed, _SITE, 3)

    def draw(self, request: Request, num_negatives: int) -> Tensor:
        nearest = self.cache.lists_for(request.step).to(request.keys.device)
        seed = derive_seed(self.seed, request.step)
        places = random_integers(request.keys, seed, num_negatives, nearest.shape[1])
        columns = torch.arange(num_negatives, device=places.device) % request.anchors.shape[1]
        return nearest[request.anchors[:, columns], places.long()]

    def probabilities(self, num_negatives: int) -> None:
        return None


class MixtureSampler:
    """A fixed share of the negatives from each of several samplers."""

    def __init__(self, parts: Sequence[tuple[Sampler, float]]) -> None:
        self.parts = parts

    def draw(self, request: Request, num_negatives: int) -> Tensor:
        return torch.cat([sampler.draw(request, count) for sampler, count in self._dealt(num_negatives)], dim=1)

    def probabilities(self, num_negatives: int) -> Tensor | None:
        """The mean over what the parts draw that have probabilities; the others' items are wanted beyond their
        share."""
        known = [
            (probabilities, count)
            for sampler, count in self._dealt(num_negatives)
            if (probabilities := sampler.probabilities(count)) is not None
        ]
        total = sum(count for _, count in known)
        return torch.stack([probabilities * (count / total) for probabilities, count in known]).sum(0)

    def _dealt(self, num_negatives: int) -> list[tuple[Sampler, int]]:
        """How many each part draws: whole numbers, so the shares of a few are not quite those asked for."""
        counts = shared_out(num_negatives, [share for _, share in self.parts])
        return [(sampler, count) for (sampler, _), count in zip(self.parts, counts, strict=True)]


def shared_out(total: int, shares: Sequence[float]) -> list[int]:
    """Divide `total` by `shares`, which add up to 1, into whole numbers: the largest remainders are rounded up."""
    exact = [total * share for share in shares]
    whole = [int(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def make_sampler(config: LossConfig, num_items: int, seed: int, counts: Counts, cache: HardCache | None) -> Sampler:
    """Build the sampler that a config names."""
    makers: dict[str, Callable[[], Any]] = {
        "uniform": lambda: UniformSampler(num_items, seed),
        "popularity": lambda: PopularitySampler(counts(), config.popularity_exponent, seed),
        "in-batch": lambda: InBatchSampler(counts(), seed),
        "hard": lambda: HardSampler(cache, seed) if cache is not None else None,
    }
    if config.sampler != "mixture":
        sampler: Sampler = makers[config.sampler]()
        return sampler
    assert config.shares is not None
    return MixtureSampler([(makers[name](), share) for name, share in config.parts() if share > 0])


def log_probabilities(sampler: Sampler, num_negatives: int) -> Tensor | None:
    """Return what is to be subtracted from every item's logit, [V] fp32, when so many are drawn together.

    None where all would lose the same.
    """
    probabilities = sampler.probabilities(num_negatives)
    if probabilities is None or bool((probabilities == probabilities[0]).all()):
        return None
    return probabilities.log().to(torch.float32)
