"""Other ways to deal sequences to ranks, to compare ours with."""

from __future__ import annotations

import heapq

import numpy as np

from turbogr.data.vocabulary import Int64Array


def deal_in_turns(costs: Int64Array, world: int) -> Int64Array:
    """Sort by cost and deal to rank 0, 1, ..., world - 1, world - 1, ..., 1, 0, 0, ...; return the ranks [n]."""
    turn = np.arange(len(costs)) % (2 * world)
    owners = np.empty(len(costs), np.int64)
    owners[np.argsort(-costs, kind="stable")] = np.where(turn < world, turn, 2 * world - 1 - turn)
    return owners


def difference(costs: Int64Array, world: int) -> Int64Array:
    """Karmarkar and Karp's differencing for `world` ranks; return the ranks [n].

    Every sequence starts as a partial deal to one rank. The two partial deals with the largest differences between
    ranks are joined, the heaviest rank of one with the lightest of the other, until one is left.
    """
    if not len(costs):
        return np.empty(0, np.int64)
    heap = []
    for place, cost in enumerate(costs.tolist()):
        loads = np.zeros(world, np.int64)
        loads[0] = cost
        heap.append((-cost, place, loads, [[place], *([] for _ in range(world - 1))]))
    heapq.heapify(heap)
    joined = len(heap)
    while len(heap) > 1:
        _, _, loads, parts = heapq.heappop(heap)
        _, _, others, other_parts = heapq.heappop(heap)
        loads = loads + others[::-1]
        order = np.argsort(-loads, kind="stable")
        loads = loads[order] - loads[order[-1]]
        both = [part + other for part, other in zip(parts, reversed(other_parts), strict=True)]
        heapq.heappush(heap, (-int(loads[0]), joined, loads, [both[place] for place in order]))
        joined += 1
    owners = np.empty(len(costs), np.int64)
    for rank, part in enumerate(heap[0][3]):
        owners[part] = rank
    return owners
