from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr.jagged import Jagged

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=8)


def make(rows):
    values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    return Jagged.from_lengths(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))


@given(ROWS)
def test_it_is_a_list_of_lists(rows):
    jagged = make(rows)
    assert [row.tolist() for row in jagged] == rows
    assert len(jagged) == jagged.num_rows == len(rows)
    assert jagged.num_values == sum(map(len, rows))
    assert jagged.lengths.tolist() == [len(row) for row in rows]
    assert jagged.max_length == max(map(len, rows), default=0)
    assert jagged.positions().tolist() == [place for row in rows for place in range(len(row))]
    assert jagged.row_index().tolist() == [index for index, row in enumerate(rows) for _ in row]
    assert jagged.offsets.dtype == torch.int64


@given(ROWS.filter(bool), st.data())
def test_rows_are_found_from_both_ends(rows, data):
    row = data.draw(st.integers(-len(rows), len(rows) - 1))
    assert make(rows)[row].tolist() == rows[row]


def test_a_row_outside_is_an_error():
    for row in (2, -3):
        with pytest.raises(IndexError, match=f"row {row} of a Jagged with 2 rows"):
            make([[1], [2, 3]])[row]
    with pytest.raises(IndexError):
        make([])[0]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_rows_of_vectors_go_together_and_come_apart(lengths):
    rows = [torch.randn(length, 3) for length in lengths]
    jagged = Jagged.from_rows(rows)
    assert jagged.values.shape == (sum(lengths), 3)
    assert all(torch.equal(a, b) for a, b in zip(jagged, rows, strict=True))


def test_lengths_of_any_integer_type():
    jagged = Jagged.from_lengths(torch.arange(3), torch.tensor([1, 2], dtype=torch.int32))
    assert jagged.offsets.tolist() == [0, 1, 3]
    assert jagged.offsets.dtype == torch.int64


def test_other_values_over_the_same_rows():
    jagged = make([[1, 2], [], [3]])
    other = jagged.with_values(torch.ones(3, 2))
    assert other.offsets is jagged.offsets
    assert other[0].shape == (2, 2)
    with pytest.raises(ValueError, match="the 4 values"):
        jagged.with_values(torch.ones(4))


def test_it_moves_with_its_offsets():
    moved = make([[1], [2, 3]]).to("meta")
    assert moved.values.device.type == moved.offsets.device.type == "meta"
    assert make([[1], [2, 3]]).to("cpu")[1].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 3], dtype=torch.int32), "int64 vector"),
        (torch.tensor([0.0, 3.0]), "int64 vector"),
        (torch.tensor([[0, 3]]), "int64 vector"),
        (torch.tensor([], dtype=torch.int64), "non-empty"),
        (torch.tensor([1, 3]), "from 0 to the 3 values, got 1 to 3"),
        (torch.tensor([0, 2]), "from 0 to the 3 values, got 0 to 2"),
        (torch.tensor([0, 4]), "got 0 to 4"),
        (torch.tensor([0, 2, 1, 3]), "must not decrease"),
        (torch.tensor([0, 3], device="meta"), "on cpu but offsets on meta"),
    ],
)
def test_offsets_that_do_not_describe_rows_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        Jagged(torch.arange(3), offsets)


def test_lengths_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="got 0 to 4"):
        Jagged.from_lengths(torch.arange(3), torch.tensor([2, 2]))
    with pytest.raises(ValueError, match="must not decrease"):
        Jagged.from_lengths(torch.arange(3), torch.tensor([4, -1]))
