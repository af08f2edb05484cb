"""The row optimisers: compiled against the definition, and Adam against torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.judging import instruction_set, needs_kernels
from turbogr.ops import native, registry, row_adagrad_, row_adam_

SHAPES = [(1, 1, 1), (10, 3, 7), (500, 200, 50), (40, 0, 8), (300, 300, 129)]
ADAM = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def make(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    num_rows, touched, width = shape
    random = torch.Generator().manual_seed(0)
    state = [torch.rand(num_rows, width, dtype=torch.float64, generator=random).to(dtype) for _ in range(3)]
    index = torch.randperm(num_rows, generator=random)[:touched]
    return state, index, torch.randn(touched, width, dtype=torch.float64, generator=random).to(dtype)


def run(shape: tuple[int, int, int], kind: str, backend: str, dtype: torch.dtype) -> list[Tensor]:
    state, index, grad = make(shape, dtype)
    with registry.backend(backend):
        if kind == "adam":
            row_adam_(*state, index, grad, step=3, **ADAM)  # type: ignore[arg-type]
        else:
            row_adagrad_(state[0], state[1], index, grad, lr=0.05, eps=1e-10)
    return [s.double() for s in state]


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_errors_are_those_of_plain_fp32(shape: tuple[int, int, int], kind: str, isa: str) -> None:
    exact = run(shape, kind, "reference", torch.float64)
    plain = run(shape, kind, "reference", torch.float32)
    with instruction_set(isa):
        ours = run(shape, kind, "auto", torch.float32)
    for e, p, o in zip(exact, plain, ours, strict=True):
        assert float((o - e).abs().max()) <= 2 * float((p - e).abs().max()) + 1e-7


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_rows_that_are_not_named_stay_as_they_are(kind: str, backend: str) -> None:
    shape = (50, 20, 6)
    before, index, _ = make(shape, torch.float32)
    after = run(shape, kind, backend, torch.float32)
    others = torch.ones(50, dtype=torch.bool)
    others[index] = False
    for b, a in zip(before, after, strict=True):
        assert torch.equal(b[others].double(), a[others])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_adam_on_every_row_is_adamw(backend: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 5)
    parameter = torch.nn.Parameter(weight.clone())
    adamw = torch.optim.AdamW([parameter], **ADAM)  # type: ignore[arg-type]
    mean, square = torch.zeros(6, 5), torch.zeros(6, 5)
    with registry.backend(backend):
        for step in range(1, 6):
            grad = torch.randn(6, 5)
            row_adam_(weight, mean, square, torch.arange(6), grad, step=step, **ADAM)  # type: ignore[arg-type]
            parameter.grad = grad
            adamw.step()
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


@needs_kernels
def test_a_table_that_cannot_be_updated_in_place_is_refused() -> None:
    weight = torch.zeros(3, 4).t()
    with pytest.raises(ValueError, match="contiguous"):
        row_adagrad_(weight, torch.zeros(4, 3), torch.tensor([0]), torch.zeros(1, 3), lr=0.1, eps=0.0)


@needs_kernels
def test_the_operators_obey_the_rules_of_torch_library() -> None:
    state, index, grad = make((10, 3, 7), torch.float32)
    torch.library.opcheck(
        torch.ops.turbogr.row_adam_.default, (*state, index, grad, None, 1, 0.01, 0.9, 0.98, 1e-8, 0.0)
    )
    torch.library.opcheck(torch.ops.turbogr.row_adagrad_.default, (*state[:2], index, grad, None, 0.01, 1e-8))


@pytest.mark.parametrize("index", [[-1], [3]])
def test_a_row_outside_the_table_is_refused(index: list[int]) -> None:
    with pytest.raises(ValueError, match="outside 0 to 2"):
        row_adagrad_(torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor(index), torch.zeros(1, 2), lr=0.1, eps=0.0)
