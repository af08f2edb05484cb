"""norm_linear: the compiled passes against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.judging import assert_close_as_plain, instruction_set, needs_kernels
from turbogr import ops
from turbogr.ops import native, norm_linear, norm_linear_pieces
from turbogr.ops.norm_linear import Activation

SHAPES = [(0, 5, 3), (1, 1, 1), (3, 7, 8), (63, 50, 200), (65, 64, 33), (200, 17, 9)]


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size)))


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_forward_and_gradients(shape: tuple[int, int, int], norm: str, activation: str, with_bias: bool) -> None:
    num_rows, width, out = shape
    inputs = [normal(num_rows, width) + 2, normal(width, out) / 4, *([normal(out)] if with_bias else [])]

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return norm_linear(x, weight, bias, norm=norm, activation=activation)  # type: ignore[arg-type]

    assert_close_as_plain(function, inputs, normal(num_rows, out), ["x", "weight", "bias"][: len(inputs)])


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set(isa: str) -> None:
    with instruction_set(isa):
        assert_close_as_plain(
            lambda x, w: norm_linear(x, w, norm="layer", activation="silu"),
            [normal(20, 50), normal(50, 30)],
            normal(20, 30),
            ["x", "weight"],
        )


@needs_kernels
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_strided_rows_serve_as_they_are(norm: str) -> None:
    wide = normal(40, 100).float()
    weight = normal(30, 20).float()
    for x in (wide[:, 10:40], wide[::2, 10:40], wide[:, 10:70:2]):
        out = norm_linear(x, weight, norm=norm, activation="silu")  # type: ignore[arg-type]
        assert torch.equal(out, norm_linear(x.contiguous(), weight, norm=norm, activation="silu"))  # type: ignore[arg-type]


@needs_kernels
def test_the_gradient_may_come_in_strides() -> None:
    x, weight = normal(30, 12).float().requires_grad_(), normal(12, 20).float()
    out = norm_linear(x, weight, norm="layer", activation="silu")
    grad = normal(30, 40).float()
    (strided,) = torch.autograd.grad(out, x, grad[:, 7:27], retain_graph=True)
    (packed,) = torch.autograd.grad(out, x, grad[:, 7:27].contiguous(), retain_graph=True)
    (expanded,) = torch.autograd.grad(out, x, torch.ones(1).expand(30, 20), retain_graph=True)
    assert torch.equal(strided, packed)
    assert torch.equal(expanded, torch.autograd.grad(out, x, torch.ones(30, 20))[0])


@needs_kernels
def test_a_large_mean_costs_no_more_precision_than_plain_fp32() -> None:
    assert_close_as_plain(
        lambda x, w: norm_linear(x, w, norm="layer", activation="none"),
        [normal(50, 64) + 1000, normal(64, 8)],
        normal(50, 8),
        ["x", "weight"],
    )


@needs_kernels
@pytest.mark.parametrize(("norm", "activation"), [("layer", "silu"), ("none", "silu"), ("rms", "none")])
def test_the_operator_obeys_the_rules_of_torch_library(norm: str, activation: str) -> None:
    arguments = (normal(6, 5).float().requires_grad_(), normal(5, 4).float().requires_grad_(), None)
    torch.library.opcheck(torch.ops.turbogr.norm_linear.default, (*arguments, [3, 1], norm, activation, 1e-6))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("widths", [[12], [5, 7], [3, 0, 8, 1]])
def test_pieces_are_the_columns_of_the_whole(widths: list[int], activation: Activation, backend: str) -> None:
    x, weight, bias = (normal(*shape).float().requires_grad_() for shape in ((40, 6), (6, 12), (12,)))
    grad = normal(40, 12).float()
    with ops.backend(backend):
        whole = norm_linear(x, weight, bias, norm="rms", activation=activation)
        pieces = norm_linear_pieces(x, weight, bias, widths=widths, norm="rms", activation=activation)
        expected = torch.autograd.grad(whole, [x, weight, bias], grad)
        actual = torch.autograd.grad(pieces, [x, weight, bias], grad.split(widths, dim=1))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    torch.testing.assert_close(actual, expected)


def test_a_piece_that_is_not_used_has_no_gradient() -> None:
    x, weight = normal(20, 6).float().requires_grad_(), normal(6, 9).float()
    first, _, last = norm_linear_pieces(x, weight, widths=[4, 2, 3], norm="layer", activation="silu")
    whole = norm_linear(x, weight, norm="layer", activation="silu")
    mask = torch.tensor([1.0] * 4 + [0.0] * 2 + [1.0] * 3)
    (actual,) = torch.autograd.grad(first.sum() + last.sum(), x)
    torch.testing.assert_close(actual, torch.autograd.grad((whole * mask).sum(), x)[0])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [([(2, 3), (4, 5)], "weight must have shape"), ([(2, 3, 1), (3, 5)], "x must have shape")],
)
def test_what_does_not_fit_is_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norm_linear(*(torch.zeros(shape) for shape in shapes), norm="layer", activation="silu")
    with pytest.raises(ValueError, match="must add up to the 5 columns"):
        norm_linear_pieces(torch.zeros(2, 3), torch.zeros(3, 5), widths=[2, 2], norm="layer", activation="silu")
