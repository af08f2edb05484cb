"""Plans several steps together, so that within each step all ranks finish at the same time.

With two sequences per rank no way to share a step makes its ranks equal: the longest sequence decides. But an epoch may
take its sequences in any order. A *window* holds the sequences of `window` steps, as the shuffled order has them. They
are put into window · ranks parts of equal cost (a long sequence alone, short ones together), the parts are sorted by
cost, and each step takes the next `ranks` of them: neighbours in that order cost nearly the same. Then the steps of all
windows are shuffled, so that neighbouring steps have nothing in common.

The plan is a function of the lengths, the model's counted cost and the numbers given, never of how many ranks there
are: `ranks` is a setting of the run, and any number of real ranks computes the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turbogr.data.batching import shuffled_order
from turbogr.data.cost import CostModel
from turbogr.data.partition import greedy
from turbogr.data.ranges import offsets_of
from turbogr.data.vocabulary import Int64Array

_STEPS = 0x5EED  # added to the seed: the order of steps must not be that of the sequences


@dataclass(frozen=True)
class PlannedSteps:
    """Step s is order[bounds[s]:bounds[s + 1]]; `parts` [N] says which part of its step each of these belongs to.

    Attributes:
        ranks: the number of parts of a step.
        refused: the steps are those of the shuffled order, because planned ones would vary more in tokens.
    """

    order: Int64Array
    bounds: Int64Array
    parts: Int64Array
    ranks: int
    refused: bool = False

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def step(self, number: int) -> tuple[Int64Array, Int64Array]:
        """Return the sequences of a step and the part of each."""
        inside = slice(self.bounds[number], self.bounds[number + 1])
        return self.order[inside], self.parts[inside]


def plan_windows(
    lengths: Int64Array,
    *,
    batch_size: int,
    ranks: int,
    window: int,
    cost: CostModel,
    seed: int = 0,
    epoch: int = 0,
) -> PlannedSteps:
    """Plan the steps of an epoch over sequences 0..N - 1 with `lengths` [N]; every sequence comes exactly once.

    There are as many steps as with consecutive batches of `batch_size` sequences, and a step has that many in the mean.
    A step of few costly sequences has about as many tokens as one of more short ones. Where the tokens of planned steps
    would vary more than those of the shuffled order, e.g. with one sequence per rank, the plan is `refused`.

    Raises:
        ValueError: an argument out of range.
    """
    if min(batch_size, ranks, window) < 1:
        raise ValueError(f"batch_size, ranks and window must be at least 1, got {batch_size}, {ranks}, {window}")
    lengths = np.asarray(lengths, np.int64)
    shuffled = shuffled_order(len(lengths), seed, epoch)
    costs = cost.whole_costs(lengths)
    steps: list[Int64Array] = []
    parts: list[Int64Array] = []
    for first in range(0, len(lengths), window * batch_size):
        chosen = shuffled[first : first + window * batch_size]
        number = -(-len(chosen) // batch_size)
        place = _place(costs[chosen], number * ranks)
        order = np.argsort(place, kind="stable")
        ends = np.searchsorted(place[order], np.arange(1, number) * ranks)
        steps += np.split(chosen[order], ends)
        parts += np.split(place[order] % ranks, ends)
    if _varies_more(lengths, steps, batch_size):
        bounds = np.append(np.arange(0, len(lengths), batch_size, dtype=np.int64), len(lengths))
        sizes = np.diff(bounds)
        in_step = np.arange(len(lengths)) - np.repeat(bounds[:-1], sizes)
        return PlannedSteps(shuffled, bounds, in_step * ranks // np.repeat(sizes, sizes), ranks, refused=True)
    turn = shuffled_order(len(steps), seed + _STEPS, epoch).tolist()
    empty = [np.empty(0, np.int64)]
    return PlannedSteps(
        np.concatenate([*empty, *(steps[step] for step in turn)]),
        offsets_of(np.array([len(steps[step]) for step in turn], np.int64)),
        np.concatenate([*empty, *(parts[step] for step in turn)]),
        ranks,
    )


def _place(costs: Int64Array, num_parts: int) -> Int64Array:
    """Put sequences with `costs` [n] into parts of equal cost; return the place [n] of each one's part by cost."""
    owners = greedy(costs, np.ones(num_parts))
    loads = np.zeros(num_parts, np.int64)
    np.add.at(loads, owners, costs)
    place = np.empty(num_parts, np.int64)
    place[np.argsort(-loads, kind="stable")] = np.arange(num_parts)
    return place[owners]


def _varies_more(lengths: Int64Array, steps: list[Int64Array], batch_size: int) -> bool:
    """Whether the tokens of planned steps vary more than those of batches in random order do in the mean.

    The steps of the last window may be smaller, all by as much; they are left out, as the last batch is.
    """
    whole = len(lengths) // batch_size
    if whole < 2:
        return False
    # The variance of a sum of batch_size of the N lengths, drawn without repetition.
    random = batch_size * lengths.var() * (len(lengths) - batch_size) / (len(lengths) - 1)
    return bool(np.array([lengths[step].sum() for step in steps[:whole]]).var() > random)
