"""embed: one pass forward, and a backward that adds duplicates up in a fixed order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.judging import (
    assert_close_as_plain,
    assert_independent_of_threads,
    instruction_set,
    needs_kernels,
    with_gradients,
)
from turbogr.ops import embed, native, registry
from turbogr.random import Dropout

SHAPES = [(0, 1, 1, 4), (1, 1, 1, 1), (9, 3, 2, 7), (300, 40, 64, 50), (1000, 700, 200, 64), (64, 5, 1, 129)]


def make(shape: tuple[int, int, int, int]) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_rows, num_positions, width = shape
    random = torch.Generator().manual_seed(0)
    tables = [torch.randn(n, width, dtype=torch.float64, generator=random) for n in (num_rows, num_positions)]
    index = torch.randint(0, num_rows, (num_tokens,), generator=random)
    positions = torch.randint(0, num_positions, (num_tokens,), generator=random)
    keys = torch.randint(-(2**60), 2**60, (num_tokens,), generator=random)
    return tables, index, positions, keys, torch.randn(num_tokens, width, dtype=torch.float64, generator=random)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dropout", [None, Dropout(0.4, 2**61 + 1)], ids=str)
def test_forward_and_gradients(shape: tuple[int, int, int, int], dropout: Dropout | None) -> None:
    tables, index, positions, keys, grad = make(shape)

    def function(rows: Tensor, position_rows: Tensor) -> Tensor:
        return embed(rows, index, position_rows, positions, scale=7.1, dropout=dropout, keys=keys)

    assert_close_as_plain(function, tables, grad, ("rows", "position_rows"))


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set_drops_the_same_elements(isa: str) -> None:
    tables, index, positions, keys, _ = make((300, 40, 64, 50))
    rows, position_rows = (t.float().abs() + 1 for t in tables)

    def dropped() -> Tensor:
        return embed(rows, index, position_rows, positions, scale=1.0, dropout=Dropout(0.5, 3), keys=keys) == 0

    with instruction_set(isa):
        ours = dropped()
    with registry.backend("reference"):
        assert torch.equal(ours, dropped())


@needs_kernels
def test_the_number_of_threads_changes_no_bit() -> None:
    tables, index, positions, keys, grad = make((200_000, 3000, 20, 5))

    def function(rows: Tensor, position_rows: Tensor) -> Tensor:
        return embed(rows, index, position_rows, positions, scale=2.0, dropout=Dropout(0.1, 8), keys=keys)

    assert_independent_of_threads(lambda: with_gradients(function, tables, grad, "auto", torch.float32))


@needs_kernels
@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rows", "positions"])
def test_only_the_wanted_gradient_is_computed(wanted: tuple[bool, bool]) -> None:
    tables, index, positions, keys, grad = make((300, 40, 64, 50))
    both = [t.float().requires_grad_() for t in tables]
    one = [t.float().requires_grad_(want) for t, want in zip(tables, wanted, strict=True)]
    for rows, position_rows in (both, one):
        embed(rows, index, position_rows, positions, scale=2.0, dropout=Dropout(0.1, 8), keys=keys).backward(
            grad.float()
        )
    for all_of_it, some, want in zip(both, one, wanted, strict=True):
        if want:
            assert some.grad is not None and torch.equal(some.grad, all_of_it.grad)
        else:
            assert some.grad is None


@needs_kernels
def test_int32_indices_and_strided_tables() -> None:
    tables, index, positions, _, _ = make((50, 30, 20, 16))
    rows, position_rows = (t.float() for t in tables)
    expected = embed(rows, index, position_rows, positions, scale=1.5)
    wide = torch.cat([rows, rows], dim=1)[:, 16:]
    assert torch.equal(embed(wide, index.int(), position_rows, positions.int(), scale=1.5), expected)


@needs_kernels
def test_the_operator_obeys_the_rules_of_torch_library() -> None:
    tables, index, positions, keys, _ = make((9, 3, 2, 7))
    rows, position_rows = (t.float().requires_grad_() for t in tables)
    torch.library.opcheck(torch.ops.turbogr.embed.default, (rows, index, position_rows, positions, keys, 2.0, 0.25, 11))


@settings(deadline=None, max_examples=60)
@given(
    index=st.lists(st.integers(-3, 8), max_size=12),
    positions=st.lists(st.integers(-2, 6), max_size=12),
)
def test_any_index_is_either_inside_or_refused(index: list[int], positions: list[int]) -> None:
    rows, position_rows = torch.randn(6, 3), torch.randn(4, 3)
    sound = len(index) == len(positions) and all(0 <= i < 6 for i in index) and all(0 <= p < 4 for p in positions)
    at, place = torch.tensor(index, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)
    if sound:
        torch.testing.assert_close(embed(rows, at, position_rows, place, scale=1.0), rows[at] + position_rows[place])
    else:
        with pytest.raises(ValueError):
            embed(rows, at, position_rows, place, scale=1.0)
