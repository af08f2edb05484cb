"""Other methods to assign sequences to ranks, to compare ours with."""

from __future__ import annotations

import heapq

import numpy as np

from turbogr.data.vocabulary import Int64Array


def zigzag(costs: Int64Array, world: int) -> Int64Array:
    """Sort by cost, then assign to rank 0, 1, ..., world - 1, world - 1, ..., 1, 0, 0, ...; return the ranks [n]."""
    turn = np.arange(len(costs)) % (2 * world)
    owners = np.empty(len(costs), np.int64)
    owners[np.argsort(-costs, kind="stable")] = np.where(turn < world, turn, 2 * world - 1 - turn)
    return owners


def karmarkar_karp(costs: Int64Array, world: int) -> Int64Array:
    """Karmarkar and Karp's differencing method for `world` ranks; return the ranks [n].

    Every sequence starts as a partial assignment to one rank. The two partial assignments with the largest differences
    between ranks are merged, the heaviest rank of one with the lightest of the other, until one is left.
    """
    if not len(costs):
        return np.empty(0, np.int64)
    heap = []
    for sequence, cost in enumerate(costs.tolist()):
        loads = np.zeros(world, np.int64)
        loads[0] = cost
        heap.append((-cost, sequence, loads, [[sequence], *([] for _ in range(world - 1))]))
    heapq.heapify(heap)
    num_made = len(heap)
    while len(heap) > 1:
        _, _, loads, parts = heapq.heappop(heap)
        _, _, others, other_parts = heapq.heappop(heap)
        loads = loads + others[::-1]
        order = np.argsort(-loads, kind="stable")
        loads = loads[order] - loads[order[-1]]
        both = [part + other for part, other in zip(parts, reversed(other_parts), strict=True)]
        heapq.heappush(heap, (-int(loads[0]), num_made, loads, [both[rank] for rank in order]))
        num_made += 1
    owners = np.empty(len(costs), np.int64)
    for rank, part in enumerate(heap[0][3]):
        owners[part] = rank
    return owners
