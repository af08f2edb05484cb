"""Samplers draw negatives for real positions only, as a function of (seed, step, event).

The draw depends on nothing else: not on the number of threads, the grouping into batches or the number of processes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from turbogr.config import LossConfig
from turbogr.ops import random_integers
from turbogr.random import derive_seed

_SITE = 0x5E6A


class Sampler(Protocol):
    """Draws item rows that serve as negatives."""

    def draw(self, keys: Tensor, step: int) -> Tensor:
        """Return negatives [T, n] int32 for the positions named by `keys` [T] int64."""
        ...


class UniformSampler:
    """Every item of the catalogue is equally likely, with replacement."""

    def __init__(self, num_items: int, num_negatives: int, seed: int) -> None:
        self.num_items, self.num_negatives = num_items, num_negatives
        self.seed = derive_seed(seed, _SITE)

    def draw(self, keys: Tensor, step: int) -> Tensor:
        return random_integers(keys, derive_seed(self.seed, step), self.num_negatives, self.num_items)


def make_sampler(config: LossConfig, num_items: int, seed: int) -> Sampler:
    """Build the sampler that a config names."""
    assert config.sampler == "uniform", config.sampler
    return UniformSampler(num_items, config.num_negatives, seed)
