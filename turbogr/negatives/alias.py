"""Drawing from a fixed distribution in constant time: the alias method.

There are V equally likely cells. Cell i gives item i with probability `threshold[i]`, else its alias, another item. An
item that is less likely than 1 / V has a *deficit*: its cell gives the rest to its alias, an item that is more likely
and has a *surplus*. All deficits add up to all surpluses. Lay the deficits end to end on one line and the surpluses on
another: the alias of an item is the one whose surplus lies where its deficit begins. An item that gives away more than
its surplus takes the difference from the next item with a surplus. So the table is built without a loop over items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.ops import random_integers
from turbogr.random import LARGEST_BOUND, derive_seed


class AliasTable(NamedTuple):
    """`thresholds` [V] and `aliases` [V], both int32; a threshold counts steps of 1 / (2**31 - 1)."""

    thresholds: Tensor
    aliases: Tensor

    @classmethod
    def of(cls, weights: NDArray[np.float64]) -> AliasTable:
        """Build the table of `weights` [V], which are positive and need not add up to 1."""
        assert len(weights) and (weights > 0).all(), "weights must be positive"
        scaled = weights * (len(weights) / weights.sum())
        thresholds, aliases = np.ones(len(weights)), np.arange(len(weights))
        unlikely, likely = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
        missing, surplus = np.cumsum(1 - scaled[unlikely]), np.cumsum(scaled[likely] - 1)
        if len(unlikely):
            begins = np.concatenate([[0.0], missing[:-1]])
            over = np.minimum(np.searchsorted(surplus, begins, side="right"), len(likely) - 1)
            thresholds[unlikely], aliases[unlikely] = scaled[unlikely], likely[over]
            at_end = np.searchsorted(missing, surplus, side="right")
            reaches_over = np.concatenate([missing, [0.0]])[at_end]
            crosses = np.concatenate([begins, [np.inf]])[at_end] < surplus
            excess = np.where(crosses, reaches_over - surplus, 0.0)
            thresholds[likely[:-1]] = 1 - excess[:-1]
            aliases[likely[:-1]] = likely[1:]
        levels = np.rint(np.clip(thresholds, 0, 1) * LARGEST_BOUND)
        return cls(torch.from_numpy(levels.astype(np.int32)), torch.from_numpy(aliases.astype(np.int32)))

    def draw(self, keys: Tensor, seed: int, num_columns: int) -> Tensor:
        """Draw items for `keys` [N] int64: [N, num_columns] int32, a function of (seed, key, column)."""
        num_items, device = self.aliases.numel(), keys.device
        cells = random_integers(keys, derive_seed(seed, 0), num_columns, num_items)
        coins = random_integers(keys, derive_seed(seed, 1), num_columns, LARGEST_BOUND)
        flat = cells.flatten()
        thresholds = self.thresholds.to(device).index_select(0, flat).view_as(cells)
        return torch.where(coins < thresholds, cells, self.aliases.to(device).index_select(0, flat).view_as(cells))
