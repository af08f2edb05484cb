"""gated_linear: the compiled passes against the definition, dropout included."""

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
from turbogr.ops import gated_linear, native, registry
from turbogr.ops.norm_linear import cpu
from turbogr.random import Dropout

SHAPES = [(0, 5, 3), (1, 1, 1), (3, 7, 8), (63, 50, 50), (65, 64, 33), (200, 17, 9), (1, 300, 50), (97, 50, 300)]
NAMES = ("x", "gate", "residual", "weight", "bias")


@pytest.fixture(params=["small", "large"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as with a small weight, and as with a large one."""
    if request.param == "large":
        monkeypatch.setattr(cpu, "SMALL_WEIGHT", -1)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(size)))


def make_inputs(num_rows: int, width: int, out: int) -> list[Tensor]:
    return [
        normal(num_rows, width),
        normal(num_rows, width, seed=1),
        normal(num_rows, out, seed=2),
        normal(width, out) / 4,
        normal(out),
    ]


def keys_of(num_rows: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (num_rows,), generator=torch.Generator().manual_seed(5))


@needs_kernels
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("dropout", [None, Dropout(0.0, 3), Dropout(0.3, 2**62 + 99)], ids=str)
def test_forward_and_gradients(shape: tuple[int, int, int], norm: str, dropout: Dropout | None) -> None:
    def function(*inputs: Tensor) -> Tensor:
        return gated_linear(*inputs, norm=norm, dropout=dropout, keys=keys_of(shape[0]))  # type: ignore[misc, arg-type]

    assert_close_as_plain(function, make_inputs(*shape), normal(shape[0], shape[2]), NAMES)


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", [(100, 7, 50), (110, 50, 13), (5, 40, 1), (13, 304, 16)], ids=str)
def test_every_instruction_set(isa: str, shape: tuple[int, int, int]) -> None:
    with instruction_set(isa):
        assert_close_as_plain(
            lambda *inputs: gated_linear(*inputs, norm="rms"),  # type: ignore[misc]
            make_inputs(*shape),
            normal(shape[0], shape[2]),
            NAMES,
        )


@needs_kernels
@pytest.mark.parametrize("shape", [(3000, 70, 50), (3000, 20, 30), (40000, 3, 2)], ids=str)
def test_many_rows(shape: tuple[int, int, int]) -> None:
    inputs, grad = make_inputs(*shape), normal(shape[0], shape[2])

    def function(*inputs: Tensor) -> Tensor:
        return gated_linear(*inputs, norm="layer", dropout=Dropout(0.3, 5), keys=keys_of(shape[0]))  # type: ignore[misc]

    assert_close_as_plain(function, inputs, grad, NAMES)
    assert_independent_of_threads(lambda: with_gradients(function, inputs, grad, "cpu", torch.float32))


@needs_kernels
@pytest.mark.parametrize("beyond", [False, True])
def test_the_largest_small_weight_and_the_next(beyond: bool) -> None:
    width = cpu.SMALL_WEIGHT // 64 + beyond
    assert_close_as_plain(
        lambda *inputs: gated_linear(*inputs, norm="rms"),  # type: ignore[misc]
        make_inputs(30, width, 64),
        normal(30, 64),
        NAMES,
    )


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set_drops_the_same_elements(isa: str) -> None:
    keys, dropout = keys_of(70), Dropout(0.5, 12345)
    ones, eye, zeros = torch.ones(70, 37), torch.eye(37), torch.zeros(70, 37)

    def gated() -> Tensor:
        return gated_linear(ones, ones, zeros, eye, norm="none", dropout=dropout, keys=keys)

    with instruction_set(isa):
        ours = gated()
    with registry.backend("reference"):
        assert torch.equal(ours, gated())
    assert 0.4 < float((ours == 0).float().mean()) < 0.6


@needs_kernels
@pytest.mark.usefixtures("way")
def test_strided_operands_are_read_in_place() -> None:
    x, gate, residual, weight, bias = (t.float() for t in make_inputs(30, 20, 10))
    wide = torch.cat([gate, residual, x], dim=1)
    strided = gated_linear(wide[:, 30:], wide[:, :20], wide[:, 20:30], weight, bias, norm="layer")
    assert torch.equal(strided, gated_linear(x, gate, residual, weight, bias, norm="layer"))


@needs_kernels
@pytest.mark.usefixtures("way")
def test_the_gradient_may_be_strided() -> None:
    inputs = [x.float().requires_grad_() for x in make_inputs(30, 20, 10)]
    grad = normal(30, 40).float()
    expanded = torch.ones(1).expand(30, 10)

    def gradients(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(gated_linear(*inputs, norm="layer"), inputs, grad)  # type: ignore[misc]

    for given in (grad[:, 7:17], grad[:, 5:25:2], expanded):
        torch.testing.assert_close(gradients(given), gradients(given.contiguous()))


@needs_kernels
@pytest.mark.usefixtures("way")
def test_the_operator_obeys_the_rules_of_torch_library() -> None:
    inputs = [x.float().requires_grad_() for x in make_inputs(6, 5, 4)]
    arguments = (*inputs, keys_of(6), "layer", 1e-6, 0.2, 7)
    torch.library.opcheck(torch.ops.turbogr.gated_linear.default, arguments)


def test_dropout_without_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout needs the keys"):
        gated_linear(*(x.float() for x in make_inputs(2, 3, 4)), norm="layer", dropout=Dropout(0.5, 1))
