"""Samplers draw negatives for real positions only, as a function of (seed, step, event).

The draw depends on nothing else: not on the number of threads, the grouping into batches or the number of processes.
A sampler that is not uniform says with which probability it draws an item, so that losses can correct their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turbogr.config import LossConfig
from turbogr.negatives.alias import AliasTable
from turbogr.negatives.hard import HardCache
from turbogr.negatives.loss_context import LossContext
from turbogr.ops import random_integers
from turbogr.plugins import find, register
from turbogr.random import derive_seed

_SITE = 0x5E6A


@dataclass(frozen=True)
class DrawRequest:
    """N draws to be made at a step.

    `keys` [N] int64 are their random keys: what is drawn must be a function of (seed, step, key). `targets` [N, a] are
    the targets of the positions that will use them, `step_targets` [S] those of the whole step, on all ranks.
    """

    keys: Tensor
    step: int
    targets: Tensor
    step_targets: Tensor


class Sampler:
    """Draws items that serve as negatives. Register one with `@register("sampler", name)` to choose it by name.

    `options` is its own section of the config, None if it has none.
    """

    needs_step_targets: bool = False
    """Whether `draw` reads the targets of the whole step."""

    def __init__(self, config: LossConfig, options: Any, context: LossContext) -> None:
        self.config, self.options, self.context = config, options, context

    def draw(self, request: DrawRequest, num_negatives: int) -> Tensor:
        """Return items [N, num_negatives], int32 or int64."""
        raise NotImplementedError

    def probabilities(self, num_negatives: int) -> Tensor | None:
        """Return the probability of every item, [V] fp64, among so many that are drawn together.

        None where logits are not to be corrected.
        """
        return None

    def is_due(self, step: int) -> bool:
        """Return whether `refresh` must be called before the rows of `step` are updated."""
        return False

    def refresh(self, weight: Tensor, step: int) -> None:
        """Derive what is kept between steps from the whole item table, `weight` [V, d]."""

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint must hold, to be loaded in place."""
        return {}


@register("sampler", "uniform")
class UniformSampler(Sampler):
    """Every item of the catalogue is equally likely, with replacement."""

    def __init__(self, config: LossConfig, options: None, context: LossContext) -> None:
        self.num_items, self.seed = context.num_items, derive_seed(context.seed, _SITE)

    def draw(self, request: DrawRequest, num_negatives: int) -> Tensor:
        return random_integers(request.keys, derive_seed(self.seed, request.step), num_negatives, self.num_items)

    def probabilities(self, num_negatives: int) -> Tensor:
        return torch.full((self.num_items,), 1 / self.num_items, dtype=torch.float64)


@register("sampler", "popularity")
class PopularitySampler(Sampler):
    """Items are drawn in proportion to a power of how often they occur in the training events, at least once."""

    def __init__(self, config: LossConfig, options: None, context: LossContext) -> None:
        weights = np.maximum(context.item_counts(), 1).astype(np.float64) ** config.popularity_exponent
        self.weights, self.table = weights, AliasTable.of(weights)
        self.seed = derive_seed(context.seed, _SITE, 1)

    def draw(self, request: DrawRequest, num_negatives: int) -> Tensor:
        return self.table.draw(request.keys, derive_seed(self.seed, request.step), num_negatives)

    def probabilities(self, num_negatives: int) -> Tensor:
        return torch.from_numpy(self.weights / self.weights.sum())


@register("sampler", "in-batch")
class InBatchSampler(Sampler):
    """Targets of the step's other positions, each equally likely: over many steps, items by their popularity.

    A position may draw its own target, which the loss leaves out.
    """

    needs_step_targets = True

    def __init__(self, config: LossConfig, options: None, context: LossContext) -> None:
        self.counts = np.maximum(context.item_counts(), 1).astype(np.float64)
        self.seed = derive_seed(context.seed, _SITE, 2)

    def draw(self, request: DrawRequest, num_negatives: int) -> Tensor:
        shape = request.keys.numel(), num_negatives
        if not request.keys.numel():
            return request.keys.new_empty(shape, dtype=torch.int32)
        seed = derive_seed(self.seed, request.step)
        places = random_integers(request.keys, seed, num_negatives, request.step_targets.numel())
        return request.step_targets.to(torch.int32).index_select(0, places.flatten()).view(shape)

    def probabilities(self, num_negatives: int) -> Tensor:
        return torch.from_numpy(self.counts / self.counts.sum())


class HardSampler(Sampler):
    """Items whose vectors lie close to the target's, from lists; they are drawn more often than is corrected for."""

    def __init__(self, config: LossConfig, options: None, context: LossContext) -> None:
        self.cache = HardCache(context.num_items, config.hard_size, config.hard_every, context.seed)
        self.seed = derive_seed(context.seed, _SITE, 3)

    def draw(self, request: DrawRequest, num_negatives: int) -> Tensor:
        nearest = self.cache.lists_for(request.step).to(request.keys.device)
        seed = derive_seed(self.seed, request.step)
        places = random_integers(request.keys, seed, num_negatives, nearest.shape[1])
        columns = torch.arange(num_negatives, device=places.device) % request.targets.shape[1]
        return nearest[request.targets[:, columns], places.long()]

    def is_due(self, step: int) -> bool:
        return self.cache.is_due(step)

    def refresh(self, weight: Tensor, step: int) -> None:
        self.cache.refresh(weight, step)

    def state(self) -> dict[str, Tensor]:
        return self.cache.state()


@register("sampler", "mixture")
class MixtureSampler(Sampler):
    """A fixed share of the negatives from each of several samplers."""

    def __init__(self, config: LossConfig, options: None, context: LossContext) -> None:
        self.parts = [(_part(name)(config, None, context), share) for name, share in config.parts() if share > 0]
        self.needs_step_targets = any(sampler.needs_step_targets for sampler, _ in self.parts)

    def draw(self, request: DrawRequest, num_negatives: int) -> Tensor:
        return torch.cat([sampler.draw(request, count) for sampler, count in self._counts(num_negatives)], dim=1)

    def probabilities(self, num_negatives: int) -> Tensor | None:
        """The mean over what the parts draw that have probabilities; the others' items are wanted beyond their
        share."""
        known = [
            (probabilities, count)
            for sampler, count in self._counts(num_negatives)
            if (probabilities := sampler.probabilities(count)) is not None
        ]
        total = sum(count for _, count in known)
        return torch.stack([probabilities * (count / total) for probabilities, count in known]).sum(0)

    def is_due(self, step: int) -> bool:
        return any(sampler.is_due(step) for sampler, _ in self.parts)

    def refresh(self, weight: Tensor, step: int) -> None:
        for sampler, _ in self.parts:
            sampler.refresh(weight, step)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for sampler, _ in self.parts for name, tensor in sampler.state().items()}

    def _counts(self, num_negatives: int) -> list[tuple[Sampler, int]]:
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


def _part(name: str) -> type[Sampler]:
    """The class of a part of a mixture; `hard` is no sampler of its own."""
    found: type[Sampler] = HardSampler if name == "hard" else find("sampler", name).factory
    return found


def make_sampler(config: LossConfig, context: LossContext) -> Sampler:
    """Build the sampler that a config names."""
    component = find("sampler", config.sampler)
    sampler: Sampler = component.factory(config, component.section(context.options), context)
    return sampler


def log_probabilities(sampler: Sampler, num_negatives: int) -> Tensor | None:
    """Return what is to be subtracted from every item's logit, [V] fp32, when so many are drawn together.

    None where all would lose the same.
    """
    probabilities = sampler.probabilities(num_negatives)
    if probabilities is None or bool((probabilities == probabilities[0]).all()):
        return None
    return probabilities.log().to(torch.float32)
