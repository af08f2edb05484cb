from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.partition import assign, exchange, greedy

costs_and_world = st.tuples(st.lists(st.integers(0, 1000) | st.integers(0, 4), max_size=80), st.integers(1, 12))


def loads(owners: np.ndarray, weights: np.ndarray, world: int) -> np.ndarray:
    return np.bincount(owners, weights=weights, minlength=world)


def textbook_greedy(costs: list[int], world: int) -> list[int]:
    """Falling order, each to the least loaded rank, the first of several."""
    heap = [(0, rank) for rank in range(world)]
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, rank = heapq.heappop(heap)
        owners[place] = rank
        heapq.heappush(heap, (load + costs[place], rank))
    return owners


@given(st.lists(st.integers(0, 1000) | st.integers(0, 4), max_size=200), st.integers(1, 12) | st.integers(30, 60))
def test_greedy_in_rounds_is_the_textbook_one(costs: list[int], world: int) -> None:
    assert greedy(np.array(costs, np.int64), np.ones(world)).tolist() == textbook_greedy(costs, world)


@given(costs_and_world)
def test_greedy_exceeds_the_mean_by_less_than_a_sequence(case: tuple[list[int], int]) -> None:
    costs, world = np.array(case[0], np.int64), case[1]
    largest = loads(greedy(costs, np.ones(world)), costs, world).max()
    assert largest <= costs.sum() / world + costs.max(initial=0)


def test_unequal_ranks_are_chosen_by_when_they_finish() -> None:
    # the fast rank takes the 10 and would be done with the 8 at 9, the slow one at 8
    owners = greedy(np.array([8, 10]), np.array([2.0, 1.0]))
    assert owners.tolist() == [1, 0]
    # the slow rank idles: it would finish later than the fast one with both
    owners = greedy(np.array([4, 4]), np.array([10.0, 1.0]))
    assert owners.tolist() == [0, 0]


@given(costs_and_world, st.randoms(use_true_random=False))
def test_exchange_keeps_all_sequences_and_never_raises_the_largest_cost(
    case: tuple[list[int], int], random: np.random.Generator
) -> None:
    costs, world = np.array(case[0], np.int64), case[1]
    tokens = np.array([random.randint(1, 50) for _ in costs], np.int64)  # type: ignore[attr-defined]
    speeds = np.array([random.choice([0.5, 1.0, 2.0]) for _ in range(world)])
    start = np.array([random.randrange(world) for _ in costs], np.int64)  # type: ignore[attr-defined]
    before = start.copy()
    owners = exchange(start, costs, tokens, speeds)
    np.testing.assert_array_equal(start, before)
    assert len(owners) == len(costs) and ((owners >= 0) & (owners < world)).all()
    mean = costs.sum() / speeds.sum()
    allowed = max((loads(start, costs, world) / speeds).max(initial=0), 1.001 * mean)
    assert (loads(owners, costs, world) / speeds).max(initial=0) <= allowed * (1 + 1e-9)


def test_a_rank_without_a_partner_does_no_harm() -> None:
    # of an odd number of ranks one is left out each turn, here the only one that is above the mean
    owners = exchange(np.array([1, 1]), np.array([5, 5]), np.array([1, 1]), np.array([1.0, 3.0, 1.0]))
    assert len(owners) == 2


def test_exchange_evens_out_what_greedy_leaves() -> None:
    random = np.random.default_rng(3)
    tokens = np.clip(8591 * np.exp(0.796 * random.standard_normal(128)), 5, 8192).astype(np.int64)
    costs = tokens + tokens**2 // 5120
    first = greedy(costs, np.ones(16))
    assigned = assign(costs, tokens, np.ones(16))
    for weights in (costs, tokens):
        assert np.ptp(loads(assigned, weights, 16)) < 0.7 * np.ptp(loads(first, weights, 16))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_degenerate_assignments(world: int) -> None:
    speeds = np.ones(world)
    empty = np.empty(0, np.int64)
    assert len(assign(empty, empty, speeds)) == 0
    zeros = np.zeros(5, np.int64)
    assert ((assign(zeros, zeros, speeds) >= 0) & (assign(zeros, zeros, speeds) < world)).all()
    giant = np.array([10**9, 1, 1, 1, 1], np.int64)
    owners = assign(giant, giant, speeds)
    assert world == 1 or (owners == owners[0]).sum() == 1
