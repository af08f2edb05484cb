"""look_up_rows: the vectors of several pieces of an index, and one gradient of the rows for all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.judging import (
    assert_close_as_plain,
    assert_independent_of_threads,
    instruction_set,
    needs_kernels,
    with_gradients,
)
from turbogr.ops import backend, look_up_rows, native

# counts, number of rows, width
CASES = [
    ([0], 1, 4),
    ([1], 1, 1),
    ([3, 0, 7], 5, 7),
    ([0, 300, 0, 5, 64], 40, 50),
    ([1000] * 32, 700, 64),
    ([64, 1], 5, 129),
]


def make(counts: list[int], num_rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, width, dtype=torch.float64, generator=random)
    index = torch.randint(0, num_rows, (sum(counts),), generator=random)
    return rows, index, torch.randn(sum(counts), width, dtype=torch.float64, generator=random)


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_forward_and_gradient(case: tuple[list[int], int, int], dtype: torch.dtype) -> None:
    counts = case[0]
    rows, index, grad = make(*case)
    assert_close_as_plain(lambda rows: torch.cat(look_up_rows(rows, index.to(dtype), counts)), [rows], grad, ("rows",))


@pytest.mark.parametrize("name", ["reference", "auto"])
def test_every_piece_is_the_look_up_of_its_indices(name: str) -> None:
    counts = [40, 0, 17, 200]
    rows, index, _ = make(counts, 30, 12)
    rows = rows.float()
    with backend(name):
        pieces = look_up_rows(rows, index, counts)
    for piece, part in zip(pieces, index.split(counts), strict=True):
        assert torch.equal(piece, rows[part])


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    counts = [300, 77]
    rows, index, grad = make(counts, 40, 50)

    def run() -> list[Tensor]:
        return with_gradients(
            lambda rows: torch.cat(look_up_rows(rows, index, counts)), [rows], grad, "cpu", torch.float32
        )

    expected = run()
    with instruction_set(isa):
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


@needs_kernels
def test_the_number_of_threads_changes_no_bit() -> None:
    counts = [90_000, 10, 60_000]
    rows, index, grad = make(counts, 3000, 5)
    assert_independent_of_threads(
        lambda: with_gradients(
            lambda rows: torch.cat(look_up_rows(rows, index, counts)), [rows], grad, "auto", torch.float32
        )
    )


@pytest.mark.parametrize("name", ["reference", "auto"])
def test_a_piece_that_nothing_used_adds_nothing_to_the_gradient(name: str) -> None:
    counts = [20, 30, 25]
    rows, index, grad = make(counts, 10, 6)
    rows = rows.float().requires_grad_()
    with backend(name):
        pieces = look_up_rows(rows, index, counts)
        # A gradient that is not contiguous, besides.
        pieces[1].backward(grad.float()[20:50].t().contiguous().t())
    expected = torch.zeros(10, 6).index_add_(0, index[20:50], grad.float()[20:50])
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, expected)


@needs_kernels
def test_operator_contract() -> None:
    rows, index, _ = make([5, 7], 6, 4)
    torch.library.opcheck(torch.ops.turbogr.look_up_rows.default, (rows.float().requires_grad_(), index, [5, 7]))


def test_what_does_not_fit_is_refused() -> None:
    rows, index, _ = make([5, 7], 6, 4)
    for counts in ([5, 6], [13, -1], []):
        with pytest.raises(ValueError, match="counts must add up to the 12"):
            look_up_rows(rows, index, counts)
    with pytest.raises(ValueError, match="int64 or int32"):
        look_up_rows(rows, index.float(), [5, 7])
    for name in ("reference", "auto"):
        with backend(name), pytest.raises(ValueError, match="index holds 6"):
            look_up_rows(rows.float(), torch.cat([index[1:], torch.tensor([6])]), [5, 7])
