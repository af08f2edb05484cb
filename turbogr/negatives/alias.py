"""Drawing from a fixed distribution in constant time: the alias method.

There are V equally likely cells. Cell i gives item i with probability `threshold[i]`, else its alias, another item. An
item that is less likely than 1 / V has a *deficit*: its cell gives the rest to its alias, an item that is more likely
and has a *surplus*. All deficits add up to all surpluses. Lay the deficits end to end on one line and the surpluses on
another: the alias of an item is the one whose surplus lies where its deficit begins. An item that gives away more than
its surplus takes the difference from the next item with a surplus. So the table is built without a loop over items.

All of this is done in whole numbers, steps of 1 / (2**31 - 1) of a cell: deficits and surpluses are equal to the last
step, and no rounding can leave an item without an alias.
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
        """Build the table of `weights` [V], which are at least 0 and need not add up to 1.

        An item's probability is exact to a step of 1 / (V (2**31 - 1)), and to the rounding of fp64 where that is
        more. An item of weight 0 is never drawn.
        """
        steps = _whole_steps(weights)
        thresholds, aliases = np.minimum(steps, LARGEST_BOUND), np.arange(len(steps))
        unlikely, likely = np.flatnonzero(steps < LARGEST_BOUND), np.flatnonzero(steps > LARGEST_BOUND)
        if len(unlikely):
            missing, surplus = np.cumsum(LARGEST_BOUND - steps[unlikely]), np.cumsum(steps[likely] - LARGEST_BOUND)
            begins = np.concatenate([[0], missing[:-1]])
            aliases[unlikely] = likely[np.searchsorted(surplus, begins, side="right")]
            # The deficit that lies over the end of each surplus but the last, where both lines end.
            over = np.searchsorted(missing, surplus[:-1], side="right")
            crosses = begins[over] < surplus[:-1]
            thresholds[likely[:-1]] -= np.where(crosses, missing[over] - surplus[:-1], 0)
            aliases[likely[:-1]] = likely[1:]
        return cls(torch.from_numpy(thresholds.astype(np.int32)), torch.from_numpy(aliases.astype(np.int32)))

    def draw(self, keys: Tensor, seed: int, num_columns: int) -> Tensor:
        """Draw items for `keys` [N] int64: [N, num_columns] int32, a function of (seed, key, column)."""
        num_items, device = self.aliases.numel(), keys.device
        cells = random_integers(keys, derive_seed(seed, 0), num_columns, num_items)
        coins = random_integers(keys, derive_seed(seed, 1), num_columns, LARGEST_BOUND)
        flat = cells.flatten()
        thresholds = self.thresholds.to(device).index_select(0, flat).view_as(cells)
        return torch.where(coins < thresholds, cells, self.aliases.to(device).index_select(0, flat).view_as(cells))


def _whole_steps(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return each weight as a whole number of steps [V]; they add up to V cells exactly."""
    assert len(weights) and np.isfinite(weights).all() and (weights >= 0).all(), "weights must be at least 0"
    assert (weights > 0).any(), "one weight must be above 0"
    weights = np.ldexp(weights, -int(np.frexp(weights.max())[1]))  # exact; the sum of huge ones would be infinite
    exact = weights * (len(weights) / weights.sum()) * LARGEST_BOUND
    rounded = np.rint(exact)
    steps: NDArray[np.int64] = rounded.astype(np.int64)
    left = len(steps) * LARGEST_BOUND - int(steps.sum())
    # What is left goes to the items that rounding changed most in the other direction, one step each.
    errors = (exact - rounded) * np.sign(left)
    chosen = np.argsort(-errors, kind="stable")[: min(abs(left), int((errors > 0).sum()))]
    steps[chosen] += np.sign(left)
    steps[steps.argmax()] += left - np.sign(left) * len(chosen)  # the rounding of fp64, where weights are few
    return steps
