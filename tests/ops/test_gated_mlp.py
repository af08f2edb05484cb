"""gated_mlp: one compiled kernel, and the operators it is made of with larger weights, against the definition."""

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
from turbogr.ops import gated_mlp, native, registry
from turbogr.ops.gated_mlp import cpu
from turbogr.random import Dropout

SHAPES = [(0, 5, 3), (1, 1, 1), (3, 7, 8), (63, 50, 50), (65, 64, 33), (200, 17, 9), (1, 100, 50), (97, 50, 130)]
NAMES = ("x", "gate_weight", "up_weight", "down_weight")


@pytest.fixture(params=["small", "large"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as with small weights, and as with large ones."""
    if request.param == "large":
        monkeypatch.setattr(cpu, "SMALL_WEIGHT", -1)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(size)))


def make_inputs(num_rows: int, width: int, hidden: int) -> list[Tensor]:
    return [
        normal(num_rows, width),
        normal(width, hidden) / 4,
        normal(width, hidden, seed=1) / 4,
        normal(hidden, width, seed=2) / 4,
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
        return gated_mlp(*inputs, norm=norm, dropout=dropout, keys=keys_of(shape[0]))  # type: ignore[misc, arg-type]

    assert_close_as_plain(function, make_inputs(*shape), normal(*shape[:2]), NAMES)


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", [(100, 7, 50), (110, 50, 13), (5, 1, 40), (13, 16, 304)], ids=str)
def test_every_instruction_set(isa: str, shape: tuple[int, int, int]) -> None:
    with instruction_set(isa):
        assert_close_as_plain(
            lambda *inputs: gated_mlp(*inputs, norm="rms", dropout=Dropout(0.5, 1), keys=keys_of(shape[0])),  # type: ignore[misc]
            make_inputs(*shape),
            normal(*shape[:2]),
            NAMES,
        )


@needs_kernels
@pytest.mark.parametrize("shape", [(3000, 50, 70), (3000, 30, 20), (40000, 2, 3)], ids=str)
def test_many_rows(shape: tuple[int, int, int]) -> None:
    inputs, grad = make_inputs(*shape), normal(*shape[:2])

    def function(*inputs: Tensor) -> Tensor:
        return gated_mlp(*inputs, norm="rms", dropout=Dropout(0.3, 5), keys=keys_of(shape[0]))  # type: ignore[misc]

    assert_close_as_plain(function, inputs, grad, NAMES)
    assert_independent_of_threads(lambda: with_gradients(function, inputs, grad, "cpu", torch.float32))


@needs_kernels
@pytest.mark.parametrize("beyond", [False, True])
def test_the_largest_small_weight_and_the_next(beyond: bool) -> None:
    inputs = make_inputs(30, 128, cpu.SMALL_WEIGHT // 128 + beyond)
    assert_close_as_plain(lambda *inputs: gated_mlp(*inputs, norm="rms"), inputs, normal(30, 128), NAMES)  # type: ignore[misc]


@needs_kernels
def test_both_ways_drop_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual is what is dropped, seen through a hidden layer that leaves signs alone."""
    keys, dropout = keys_of(70), Dropout(0.5, 12345)
    inputs = [torch.ones(70, 37), torch.eye(37), torch.eye(37), torch.eye(37)]

    def kept() -> Tensor:
        return gated_mlp(*inputs, norm="none", dropout=dropout, keys=keys) > 1  # type: ignore[misc]

    fused = kept()
    monkeypatch.setattr(cpu, "SMALL_WEIGHT", -1)
    assert torch.equal(fused, kept())
    with registry.backend("reference"):
        assert torch.equal(fused, kept())
    assert 0.4 < float(fused.float().mean()) < 0.6


@needs_kernels
@pytest.mark.usefixtures("way")
def test_strided_operands_are_read_in_place() -> None:
    x, gate, up, down = (t.float() for t in make_inputs(30, 20, 10))
    wide = torch.cat([torch.zeros(30, 7), x], dim=1)
    joined = torch.cat([gate, up], dim=1)
    strided = gated_mlp(wide[:, 7:], joined[:, :10], joined[:, 10:], down.t().contiguous().t(), norm="layer")
    assert torch.equal(strided, gated_mlp(x, gate, up, down, norm="layer"))


@needs_kernels
@pytest.mark.usefixtures("way")
def test_the_gradient_may_be_strided() -> None:
    inputs = [x.float().requires_grad_() for x in make_inputs(30, 20, 10)]
    grad = normal(30, 60).float()
    expanded = torch.ones(1).expand(30, 20)

    def gradients(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(gated_mlp(*inputs, norm="layer"), inputs, grad)  # type: ignore[misc]

    for given in (grad[:, 7:27], grad[:, 5:45:2], expanded):
        torch.testing.assert_close(gradients(given), gradients(given.contiguous()))


@needs_kernels
def test_the_operator_obeys_the_rules_of_torch_library() -> None:
    inputs = [x.float().requires_grad_() for x in make_inputs(6, 5, 4)]
    torch.library.opcheck(torch.ops.turbogr.gated_mlp.default, (*inputs, keys_of(6), "layer", 1e-6, 0.2, 7))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_weights_that_do_not_fit_are_refused(number: int) -> None:
    inputs = [x.float() for x in make_inputs(2, 3, 4)]
    inputs[number] = inputs[number][:-1]
    with pytest.raises(ValueError, match=NAMES[number]):
        gated_mlp(*inputs, norm="layer")  # type: ignore[misc]


def test_dropout_without_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout needs the keys"):
        gated_mlp(*(x.float() for x in make_inputs(2, 3, 4)), norm="layer", dropout=Dropout(0.5, 1))  # type: ignore[misc]
