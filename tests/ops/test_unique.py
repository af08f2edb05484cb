"""unique_rows against torch.unique."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.judging import needs_kernels
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
def test_pieces_of_any_type_and_shape_are_ranked_together(backend: str) -> None:
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
def test_any_ids_are_either_ranked_or_refused(ids: list[int], num_rows: int) -> None:
    tensor = torch.tensor(ids, dtype=torch.int64)
    if all(0 <= i < num_rows for i in ids):
        distinct, index = unique_rows(tensor, num_rows)
        assert distinct.tolist() == sorted(set(ids))
        assert torch.equal(distinct[index], tensor)
    else:
        with pytest.raises(ValueError, match="ids holds"):
            unique_rows(tensor, num_rows)


@needs_kernels
def test_the_operator_obeys_the_rules_of_torch_library() -> None:
    torch.library.opcheck(
        torch.ops.turbogr.unique_rows.default,
        ([torch.tensor([3, 1, 3])], 5),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
