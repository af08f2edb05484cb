"""sampled_logits: the compiled kernel against the definition in fp64, judged by the error of plain fp32."""

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
from turbogr.ops import native, registry, sampled_logits

SHAPES = [  # positions, candidates, rows, width
    (0, 4, 5, 3),
    (3, 0, 5, 3),
    (1, 1, 1, 2),
    (3, 3, 5, 8),
    (17, 5, 9, 17),
    (63, 65, 40, 50),
    (65, 128, 300, 64),
    (40, 127, 5000, 33),
    (20, 31, 100, 256),
]
NAMES = ("queries", "rows")


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(size)))


def make_inputs(shape: tuple[int, int, int, int]) -> list[Tensor]:
    num_positions, _, num_rows, width = shape
    return [normal(num_positions, width), normal(num_rows, width, seed=1)]


def index_of(shape: tuple[int, int, int, int]) -> Tensor:
    return torch.randint(0, shape[2], shape[:2], generator=torch.Generator().manual_seed(2))


def logits_of(shape: tuple[int, int, int, int], normalize: bool = True):  # type: ignore[no-untyped-def]
    index = index_of(shape)
    return lambda queries, rows: sampled_logits(queries, rows, index, temperature=0.05, normalize=normalize)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_forward_and_gradients(shape: tuple[int, int, int, int], normalize: bool) -> None:
    assert_close_as_plain(logits_of(shape, normalize), make_inputs(shape), normal(*shape[:2]), NAMES)


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", [(63, 65, 40, 50), (20, 7, 30, 130)], ids=str)
def test_every_instruction_set(isa: str, shape: tuple[int, int, int, int]) -> None:
    with instruction_set(isa):
        assert_close_as_plain(logits_of(shape), make_inputs(shape), normal(*shape[:2]), NAMES)


@needs_kernels
def test_the_result_does_not_depend_on_the_threads() -> None:
    shape = (500, 20, 90, 24)
    inputs, grad = make_inputs(shape), normal(500, 20)
    assert_independent_of_threads(lambda: with_gradients(logits_of(shape), inputs, grad, "cpu", torch.float32))


def test_the_definition_has_the_gradient_it_claims() -> None:
    inputs = [x.requires_grad_() for x in make_inputs((4, 3, 5, 3))]
    assert torch.autograd.gradcheck(logits_of((4, 3, 5, 3)), inputs)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_nan_reaches_only_the_logits_of_its_row(backend: str) -> None:
    inputs = make_inputs((4, 3, 6, 5))
    inputs[1][2, 1] = float("nan")
    logits, *_ = with_gradients(logits_of((4, 3, 6, 5)), inputs, torch.ones(4, 3), backend, torch.float32)
    assert torch.equal(logits.isnan(), index_of((4, 3, 6, 5)) == 2)


@needs_kernels
def test_operands_may_be_strided_and_the_index_int32() -> None:
    queries, rows = (x.float() for x in make_inputs((30, 7, 40, 10)))
    index = index_of((30, 7, 40, 10))
    expected = sampled_logits(queries, rows, index, temperature=0.1)
    wide = torch.cat([queries, queries], 1)[:, 10:]
    turned = index.t().contiguous().t().int()
    assert torch.equal(sampled_logits(wide, rows.t().contiguous().t(), turned, temperature=0.1), expected)


@needs_kernels
@pytest.mark.parametrize("normalize", [True, False])
def test_the_operator_obeys_the_rules_of_torch_library(normalize: bool) -> None:
    queries, rows = (x.float().requires_grad_() for x in make_inputs((6, 3, 5, 4)))
    arguments = (queries, rows, index_of((6, 3, 5, 4)), 0.1, normalize)
    torch.library.opcheck(torch.ops.turbogr.sampled_logits.default, arguments)


def test_bad_arguments_are_refused() -> None:
    queries, rows = (x.float() for x in make_inputs((3, 2, 5, 4)))
    index = torch.tensor([[0, 1], [2, 3], [4, 0]])
    with pytest.raises(ValueError, match="rows must have shape"):
        sampled_logits(queries, rows[:, :3], index, temperature=1.0)
    with pytest.raises(ValueError, match="index must have shape"):
        sampled_logits(queries, rows, index[:2], temperature=1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        sampled_logits(queries, rows, index, temperature=-1.0)
    for backend in ("reference", "auto"):
        with registry.backend(backend), pytest.raises(ValueError, match="index holds 5"):
            sampled_logits(queries, rows, index + 1, temperature=1.0)
