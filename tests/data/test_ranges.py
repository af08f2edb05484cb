from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.ranges import concatenated_ranges, cut_by_budget, offsets_of

SIZES = st.lists(st.integers(0, 9), max_size=30)


@given(sizes=SIZES, budget=st.integers(1, 20), start=st.integers(0, 5))
def test_pieces_are_as_large_as_the_budget_allows(sizes: list[int], budget: int, start: int) -> None:
    bounds = cut_by_budget(offsets_of(np.array(sizes, np.int64)) + start, budget).tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    for first, last in itertools.pairwise(bounds):
        assert first < last
        assert sum(sizes[first:last]) <= budget or last == first + 1
        if last < len(sizes):
            assert sum(sizes[first : last + 1]) > budget


def test_a_range_larger_than_the_budget_is_a_piece_alone() -> None:
    assert cut_by_budget(np.array([0, 1, 11, 12, 13]), 3).tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2]])
def test_offsets_and_concatenated_ranges(lengths: list[int]) -> None:
    offsets = offsets_of(np.array(lengths, np.int64))
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    assert concatenated_ranges(offsets[:-1] + 5, np.diff(offsets)).tolist() == list(range(5, 5 + sum(lengths)))
