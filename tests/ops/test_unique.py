"""unique_rows against torch.unique."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.judging import assert_independent_of_threads, needs_kernels
from turbogr import ops
from turbogr.ops import unique_rows
from turbogr.ops.unique import reference


@pytest.mark.parametrize(
    ("n", "num_rows"),
    [(0, 0), (0, 10), (1, 1), (100, 7), (5000, 64), (5000, 65), (70_000, 1_000_000), (10, 50_000_000)],
)
def test_against_the_definition(n: int, num_rows: int) -> None:
    ids = torch.randint(0, max(num_rows, 1), (n,), generator=torch.Generator().manual_seed(0))
    distinct, index = unique_rows(ids, num_rows)
    expected, places = reference.unique_rows([ids], num_rows)
    assert torch.equal(distinct, expected)
    assert torch.equal(index, places)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_pieces_of_any_type_and_shape_are_numbered_together(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = [
        torch.randint(0, 9000, (40,), generator=generator),
        torch.empty(0, dtype=torch.int64),
        torch.randint(0, 9000, (300, 128), dtype=torch.int32, generator=generator),
        torch.randint(0, 9000, (90, 8), generator=generator)[:, ::2],
    ]
    with ops.backend(backend):
        distinct, index = unique_rows(pieces, 9000)
    together = torch.cat([piece.flatten().long() for piece in pieces])
    assert index.dtype == torch.int32
    assert torch.equal(distinct, together.unique())
    assert torch.equal(distinct[index], together)
    with pytest.raises(ValueError, match=r"ids holds 9000 at \(0,\), outside 0 to 8999"):
        unique_rows([*pieces, torch.tensor([9000], dtype=torch.int32)], 9000)


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(-5, 140), max_size=80), num_rows=st.integers(0, 130))
def test_any_ids_are_either_numbered_or_refused(ids: list[int], num_rows: int) -> None:
    tensor = torch.tensor(ids, dtype=torch.int64)
    if all(0 <= i < num_rows for i in ids):
        distinct, index = unique_rows(tensor, num_rows)
        assert distinct.tolist() == sorted(set(ids))
        assert torch.equal(distinct[index], tensor)
    else:
        with pytest.raises(ValueError, match="ids holds"):
            unique_rows(tensor, num_rows)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("num_rows", [400, 3_000_000_000], ids=["bitmap", "sorting"])
def test_tensors_of_several_tables_share_one_space_of_rows(backend: str, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bases = [(0, 90), (num_rows - 200, 200), (0, 90), (100, 0), (90, 7)]
    ids = [
        torch.randint(0, 90, (30, 4), generator=generator),
        torch.randint(0, 200, (50,), dtype=torch.int32, generator=generator),
        torch.randint(0, 90, (6, 8), generator=generator)[:, ::2],
        torch.empty(0, dtype=torch.int64),
        torch.arange(7, dtype=torch.int32),
    ]
    with ops.backend(backend):
        distinct, index = unique_rows(ids, num_rows, bases)
    rows = torch.cat([tensor.flatten().long() + base for tensor, (base, _) in zip(ids, bases, strict=True)])
    assert torch.equal(distinct, rows.unique())
    assert torch.equal(distinct[index], rows)


def test_long_tensors_of_several_tables_are_split_between_threads() -> None:
    sizes = [40_000, 3, 70_000, 16_384, 1]
    generator = torch.Generator().manual_seed(0)
    bases = [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    ids = [torch.randint(0, size, (size * 2,), generator=generator) for size in sizes]

    def run() -> list[torch.Tensor]:
        return list(unique_rows(ids, sum(sizes), bases))

    assert_independent_of_threads(run)
    distinct, index = run()
    rows = torch.cat([tensor + base for tensor, (base, _) in zip(ids, bases, strict=True)])
    assert torch.equal(distinct[index], rows)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("wrong", [-1, 5, 9, 2**62, 2**63 - 1, -(2**63)])
def test_an_id_outside_its_own_table_is_named_with_its_tensor(backend: str, wrong: int) -> None:
    ids = [torch.tensor([0, 9]), torch.tensor([[4, wrong]])]
    message = rf"ids\[1\] holds {wrong} at \(0, 1\), outside 0 to 4"
    with ops.backend(backend), pytest.raises(ValueError, match=message):
        unique_rows(ids, 100, [(0, 10), (10, 5)])


@pytest.mark.parametrize("bases", [[(-1, 5)], [(0, 11)], [(6, 5)], [(5, -1)]])
def test_a_table_outside_the_rows_is_refused(bases: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="is not inside the 10 rows"):
        unique_rows([torch.tensor([0])], 10, bases)


def test_every_tensor_needs_its_table() -> None:
    with pytest.raises(ValueError, match=r"one pair \(base, size\) per tensor of ids: 2, got 1"):
        unique_rows([torch.tensor([0])] * 2, 10, [(0, 10)])


@needs_kernels
@pytest.mark.parametrize("tables", [[], [2, 4]])
def test_the_operator_obeys_the_rules_of_torch_library(tables: list[int]) -> None:
    torch.library.opcheck(
        torch.ops.turbogr.unique_rows.default,
        ([torch.tensor([3, 1, 3])], 6, tables),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
