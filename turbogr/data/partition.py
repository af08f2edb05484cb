"""Assigning the sequences of one step to ranks so that all finish at the same time: pure functions over arrays.

Greedy first: the costliest sequence goes to the rank that would finish it first (LPT, "longest processing time"). Then
exchanges: ranks are paired, and each pair swaps two sequences (or moves one) to bring their costs closest together.
`turbogr bench balance` compares this with round-robin assignment and with Karmarkar-Karp's differencing: greedy is best
with few sequences of very different cost, exchanges reduce the rest, and only they can balance tokens and cost at
once. Equal tokens beside equal cost make memory even, and keep the balance where the cost model is inaccurate.

Costs are whole numbers (`CostModel.whole_costs`) and their sums exact, so every machine computes the same assignment.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from turbogr.data.cost import Float64Array
from turbogr.data.vocabulary import Int64Array

_ENOUGH = 1e-3  # below this imbalance of cost, exchanges only look at tokens
_ENOUGH_TOKENS = 5e-3
_FEW_RANKS = 32
_ROUNDS = 32
_PATIENCE = 6  # rounds without any exchange before giving up; each pairs the ranks in another way
_TOKEN_WEIGHT = 0.5  # of squared differences of tokens against those of cost
_MAX_PAIRS = 2**20  # pairs of sequences compared in one round; with more, greedy alone is balanced well enough


def assign(costs: Int64Array, tokens: Int64Array, speeds: Float64Array) -> Int64Array:
    """Return the rank [n] of every sequence such that cost ÷ speed is as equal as possible over ranks.

    `costs` and `tokens` are [n] and not negative, `speeds` [world] positive.
    """
    return exchange(greedy(costs, speeds), costs, tokens, speeds)


def greedy(costs: Int64Array, speeds: Float64Array) -> Int64Array:
    """Assign the sequences in falling order of cost, each to the rank that would finish it first; return the ranks [n].

    Among ranks of equal speed none then costs more than the mean plus one sequence.
    """
    order = np.argsort(-costs, kind="stable")
    owners = np.empty(len(costs), np.int64)
    equal = (speeds == speeds[0]).all()
    owners[order] = _greedy_equal(costs[order], len(speeds)) if equal else _greedy_unequal(costs[order], speeds)
    return owners


def _greedy_equal(costs: Int64Array, world: int) -> Int64Array:
    """Greedy among ranks of equal speed, in rounds of one sequence per rank.

    As long as no rank would get two sequences in a round, the round is a sort of the ranks by load; with many
    sequences per rank nearly all rounds are of that kind. For few ranks that is not worth it.
    """
    loads = np.zeros(world, np.int64)
    if world < _FEW_RANKS:
        return _one_by_one(costs, loads)
    owners = np.empty(len(costs), np.int64)
    for first in range(0, len(costs), world):
        part = costs[first : first + world]
        ranks = np.argsort(loads, kind="stable")[: len(part)]
        before = loads[ranks]
        after = before + part
        if (np.minimum.accumulate(after)[:-1] > before[1:]).all():
            loads[ranks] = after
        else:
            ranks = _one_by_one(part, loads)
        owners[first : first + world] = ranks
    return owners


def _one_by_one(costs: Int64Array, loads: Int64Array) -> Int64Array:
    """Assign each sequence to the least loaded rank; `loads` [world] is updated in place."""
    heap = list(zip(loads.tolist(), range(len(loads)), strict=True))
    heapq.heapify(heap)
    owners = []
    for cost in costs.tolist():
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + cost, rank))
        owners.append(rank)
    for load, rank in heap:
        loads[rank] = load
    return np.array(owners, np.int64)


def _greedy_unequal(costs: Int64Array, speeds: Float64Array) -> Int64Array:
    """Greedy among ranks of unequal speed: the rank that would finish the sequence first, not the first idle one."""
    loads = np.zeros(len(speeds), np.int64)
    owners = np.empty(len(costs), np.int64)
    for index, cost in enumerate(costs.tolist()):
        rank = int(np.argmin((loads + cost) / speeds))
        loads[rank] += cost
        owners[index] = rank
    return owners


def exchange(owners: Int64Array, costs: Int64Array, tokens: Int64Array, speeds: Float64Array) -> Int64Array:
    """Improve an assignment by swaps and moves between pairs of ranks; return the new owners [n].

    The largest cost of a rank never rises, except where it stays within 0.1 % of the mean; tokens are evened out as
    far as that allows.
    """
    world, num = len(speeds), len(costs)
    if world < 2 or num < 2 or not tokens.any():
        return owners
    slots = _slots(owners, world)
    half, width = world // 2, slots.shape[1]
    if half * width * width > _MAX_PAIRS:
        return owners
    share = speeds / math.fsum(speeds.tolist())
    unit = np.array([[max(1, int(costs.sum()))], [int(tokens.sum())]]) * share
    held = np.zeros((2, num + 1))  # whole numbers, so sums are exact; the last column is the empty slot
    held[0, :num], held[1, :num] = costs, tokens
    held = held[:, slots]
    idle = 0
    for turn in range(_ROUNDS):
        totals = held.sum(axis=2)
        loads = totals / unit
        unbalanced = (loads[0] > 1 + _ENOUGH) | (loads[1] > 1 + _ENOUGH_TOKENS)
        if not unbalanced.any():
            break
        givers, takers = _pairs(loads, turn)
        worth = unbalanced[givers] | unbalanced[takers]
        givers, takers = givers[worth], takers[worth]
        chosen = _best_swaps(held, totals, unit, givers, takers)
        better = chosen >= 0
        if not better.any():  # also when the one rank that needs an exchange has no partner this turn
            idle += 1
            if idle == _PATIENCE:
                break
            continue
        idle = 0
        giver, taker, chosen = givers[better], takers[better], chosen[better]
        given, taken = chosen // width, chosen % width
        slots[giver, given], slots[taker, taken] = slots[taker, taken], slots[giver, given]
        held[:, giver, given], held[:, taker, taken] = held[:, taker, taken], held[:, giver, given]
    improved = np.empty(num + 1, np.int64)
    improved[slots] = np.arange(world)[:, None]
    return improved[:num]


def _slots(owners: Int64Array, world: int) -> Int64Array:
    """Return the sequences of every rank in slots [world, width], filled up with n, at least one slot empty."""
    counts = np.bincount(owners, minlength=world)
    slots = np.full((world, int(counts.max()) + 1), len(owners), np.int64)
    order = np.argsort(owners, kind="stable")
    column = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    slots[owners[order], column] = order
    return slots


def _pairs(loads: Float64Array, turn: int) -> tuple[Int64Array, Int64Array]:
    """Pair ranks that differ much, by cost, by tokens or by both in turn; return givers and takers."""
    cost, token = loads
    key = (cost, token, cost + token, token - cost)[turn % 4]
    order = np.argsort(key, kind="stable")
    half = len(order) // 2
    return np.roll(order[len(order) - half :][::-1], turn // 4), order[:half]


def _best_swaps(
    held: Float64Array, totals: Float64Array, unit: Float64Array, givers: Int64Array, takers: Int64Array
) -> Int64Array:
    """Return for each pair of ranks the swap that brings it closest together, or -1 where none does.

    `held` [2, world, width] are cost and tokens of every slot, `totals` and `unit` [2, world] their sums and fair
    shares. A swap is giver's slot · width + taker's slot.
    """
    loads = totals / unit
    limit = max(float(loads[0].max()), 1 + _ENOUGH)
    now = loads[:, givers] - loads[:, takers]
    rate = 1 / unit[:, givers] + 1 / unit[:, takers]
    kept = now[:, :, None] - held[:, givers] * rate[:, :, None]
    back = held[:, takers] * rate[:, :, None]
    cost = kept[0][:, :, None] + back[0][:, None, :]  # how far apart the pair is after the swap
    # the giver's load may rise to the limit, and so may the taker's
    most = now[0] + (limit - loads[0, givers]) * unit[0, givers] * rate[0]
    least = now[0] - (limit - loads[0, takers]) * unit[0, takers] * rate[0]
    outside = (cost > most[:, None, None]) | (cost < least[:, None, None])
    token = kept[1][:, :, None] + back[1][:, None, :]
    error = cost * cost + _TOKEN_WEIGHT * (token * token)
    error[outside] = math.inf
    flat = error.reshape(len(givers), held.shape[2] ** 2)
    best = flat.argmin(axis=1)
    gain = flat[np.arange(len(best)), best] < (now[0] ** 2 + _TOKEN_WEIGHT * now[1] ** 2) * (1 - 1e-6)
    return np.where(gain, best, -1)
