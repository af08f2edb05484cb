"""Which rank trains on which sequences in which step, planned from the lengths alone.

Every rank knows all lengths from the store and computes the same plan by itself: nothing is communicated. Sequences
stay whole, none is dropped, and every sequence comes exactly once an epoch.

A step is the same batch on any number of ranks: consecutive sequences of the shuffled order, whatever their lengths.
Balancing only decides which rank computes which part, so it changes neither the weights nor where an epoch can be
continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from turbogr.data.batching import batch_bounds, shuffled_order
from turbogr.data.cost import CostModel, Float64Array
from turbogr.data.partition import assign, exchange
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError

Strategy = Literal["auto", "none", "token-budget", "reallocate"]

_SHORT = 0.1  # share of attention in the cost below which sequences count as short


@dataclass(frozen=True)
class StepPlan:
    """The steps of an epoch: `plan[step]` is a list of one int64 array of sequences per rank, some perhaps empty.

    The sequences of a step are assigned to ranks when the step is asked for, so planning a long epoch costs little.

    Attributes:
        strategy: as resolved, never "auto".
        order: [N], all sequences in the order of the epoch.
        bounds: [steps + 1]; step s is order[bounds[s]:bounds[s + 1]].
        lengths: [N], by sequence.
        speeds: [world].
    """

    strategy: Strategy
    order: Int64Array
    bounds: Int64Array
    lengths: Int64Array
    cost: CostModel
    speeds: Float64Array

    @property
    def world(self) -> int:
        return len(self.speeds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, step: int) -> list[Int64Array]:
        chosen = self.global_batch(step)
        lengths = self.lengths[chosen]
        parts = share_step(lengths, world=self.world, strategy=self.strategy, cost=self.cost, speeds=self.speeds)
        return [chosen[part] for part in parts]

    def __iter__(self) -> Iterator[list[Int64Array]]:
        return (self[step] for step in range(len(self)))

    def global_batch(self, step: int) -> Int64Array:
        """Return the sequences of all ranks together in `step`, in the order of the epoch."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        return self.order[self.bounds[step] : self.bounds[step + 1]]


def plan_steps(
    lengths: Int64Array,
    *,
    world: int,
    strategy: Strategy = "auto",
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    cost: CostModel | None = None,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> StepPlan:
    """Plan the steps of an epoch over sequences 0..N - 1 with `lengths` [N]; every sequence comes exactly once.

    `batch_size` (sequences) or `batch_tokens`, exactly one of them, is the batch of all ranks together: the steps are
    the batches of `plan_batches`, and no step has more than `batch_tokens` tokens unless a single sequence does.
    `strategy` says how the ranks share a step:

    - "none": equally many sequences each;
    - "token-budget", with `batch_tokens`: equally many tokens, each rank its part of the budget;
    - "reallocate": equal cost, and as far as that allows equally many tokens;
    - "auto": see `resolve_strategy`.

    Both that balance do so relative to the ranks' `speeds` [world], equal ones by default, and are never less equal
    than "none". `cost` defaults to counting tokens.

    Raises:
        UserError: not as many speeds as ranks.
        ValueError: an argument out of range, an unknown strategy, or "token-budget" without `batch_tokens`.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"lengths must not be negative, got {lengths.min()}")
    cost = cost or CostModel()
    strategy = resolve_strategy(strategy, lengths, cost, batch_tokens)
    order = shuffled_order(len(lengths), seed, epoch)
    bounds = batch_bounds(lengths[order], batch_size=batch_size, batch_tokens=batch_tokens)
    return StepPlan(strategy, order, bounds, lengths, cost, check_speeds(world, speeds))


def share_step(
    lengths: Int64Array,
    *,
    world: int,
    strategy: Strategy,
    cost: CostModel | None = None,
    speeds: Sequence[float] | Float64Array | None = None,
    parts: Int64Array | None = None,
    num_parts: int = 1,
) -> list[Int64Array]:
    """Share the sequences of one step, with `lengths` [n], between `world` ranks as `plan_steps` does.

    `strategy` is not "auto". A step that was planned for `num_parts` ranks (`step_windows.py`) has the part [n] of each
    sequence; ranks then take whole parts where that is more equal. Returns the indices 0..n - 1 of each rank's
    sequences, ascending; a rank may get none.

    Raises:
        UserError: not as many speeds as ranks.
        ValueError: an argument out of range.
    """
    assert strategy != "auto", "resolve the strategy first"
    ranks = check_speeds(world, speeds)
    owners = contiguous_owners(len(lengths), world)
    if strategy != "none" and world > 1:
        costs = lengths if strategy == "token-budget" else (cost or CostModel()).whole_costs(lengths)
        ways = [assign(costs, lengths, ranks), owners]
        if parts is not None:
            ways.insert(0, exchange(parts * world // num_parts, costs, lengths, ranks))
        owners = min(ways, key=lambda way: _longest(way, costs, ranks))  # the first of equal ones
    ends = np.cumsum(np.bincount(owners, minlength=world))
    return np.split(np.argsort(owners, kind="stable"), ends[:-1])


def _longest(owners: Int64Array, costs: Int64Array, speeds: Float64Array) -> float:
    """Cost ÷ speed of the rank that finishes last."""
    loads = np.zeros(len(speeds), np.int64)
    np.add.at(loads, owners, costs)
    return float((loads / speeds).max())


def resolve_strategy(strategy: str, lengths: Int64Array, cost: CostModel, batch_tokens: int | None = None) -> Strategy:
    """Return what "auto" stands for with these lengths; other strategies stay.

    Batches of `batch_tokens` with short sequences, for which attention is less than a tenth of the epoch's cost, are
    shared by tokens: that needs no measured cost and bounds memory best. All others are shared by cost.

    Raises:
        ValueError: an unknown strategy, or "token-budget" without `batch_tokens`.
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}")
    if strategy == "token-budget" and batch_tokens is None:
        raise ValueError("token-budget needs batch_tokens")
    if strategy != "auto":
        return cast(Strategy, strategy)
    total = float(cost.cost(lengths).sum())
    short = total - cost.a * float(lengths.sum()) <= _SHORT * total
    return "token-budget" if batch_tokens is not None and short else "reallocate"


def contiguous_owners(num: int, world: int) -> Int64Array:
    """Return the rank [num] of each sequence when every rank takes equally many of them (± 1) in order."""
    return np.arange(num, dtype=np.int64) * world // max(1, num)


def wait_share(loads: NDArray[Any]) -> float:
    """Return which share of the ranks' time is spent waiting for the slowest one, 0 to 1.

    `loads` [steps, world] are seconds, or costs ÷ speeds; a step lasts as long as its slowest rank. Given measured
    times of every rank's own work, this is the paper's imbalance: time waited at the barrier ÷ time of the step.
    """
    loads = np.atleast_2d(np.asarray(loads, np.float64))
    total = float(loads.max(axis=1).sum()) if loads.size else 0.0
    return 0.0 if total <= 0 else 1.0 - float(loads.mean(axis=1).sum()) / total


def check_speeds(world: int, speeds: Sequence[float] | Float64Array | None) -> Float64Array:
    """Return the speeds of `world` ranks, [world], equal ones where none are given.

    Raises:
        UserError: not as many speeds as ranks.
        ValueError: no ranks, or a speed that is not positive.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    checked = np.ones(world) if speeds is None else np.array(speeds, np.float64)
    if checked.shape != (world,):
        raise UserError(f"parallel.speeds has {len(checked)} numbers for {world} ranks; give one for each rank")
    if not (np.isfinite(checked) & (checked > 0)).all():
        raise ValueError(f"speeds must be positive, got {checked.min():g}")
    return checked
