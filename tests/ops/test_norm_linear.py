"""norm_linear: the compiled passes against the definition."""

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
from turbogr import ops
from turbogr.ops import native, norm_linear, norm_linear_pieces
from turbogr.ops.norm_linear import Activation, cpu

SHAPES = [(0, 5, 3), (1, 1, 1), (3, 7, 8), (63, 50, 200), (65, 64, 33), (200, 17, 9), (1, 50, 300), (97, 300, 50)]


@pytest.fixture(params=["small", "large"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as with a small weight, and as with a large one."""
    if request.param == "large":
        monkeypatch.setattr(cpu, "SMALL_WEIGHT", -1)


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size)))


@needs_kernels
@pytest.mark.usefixtures("way")
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
@pytest.mark.parametrize("shape", [(20, 50, 30), (100, 7, 50), (110, 50, 13), (5, 40, 1), (13, 16, 304)], ids=str)
def test_every_instruction_set(isa: str, shape: tuple[int, int, int]) -> None:
    num_rows, width, out = shape
    with instruction_set(isa):
        assert_close_as_plain(
            lambda x, w, b: norm_linear(x, w, b, norm="layer", activation="silu"),
            [normal(num_rows, width), normal(width, out), normal(out)],
            normal(num_rows, out),
            ["x", "weight", "bias"],
        )


@needs_kernels
@pytest.mark.parametrize("shape", [(3000, 50, 70), (40000, 3, 2)], ids=str)
def test_many_rows(shape: tuple[int, int, int]) -> None:
    num_rows, width, out = shape
    inputs = [normal(num_rows, width), normal(width, out), normal(out)]

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norm_linear(x, weight, bias, norm="layer", activation="silu")

    grad = normal(num_rows, out)
    assert_close_as_plain(function, inputs, grad, ["x", "weight", "bias"])
    assert_independent_of_threads(lambda: with_gradients(function, inputs, grad, "cpu", torch.float32))


@needs_kernels
@pytest.mark.parametrize("beyond", [False, True])
def test_the_largest_small_weight_and_the_next(beyond: bool) -> None:
    out = cpu.SMALL_WEIGHT // 64 + beyond
    inputs = [normal(30, 64), normal(64, out) / 8]
    _, _, normed, _ = torch.ops.turbogr.norm_linear(*(x.float() for x in inputs), None, [out], "rms", "silu", 1e-6)
    assert (normed.numel() > 0) == beyond
    assert_close_as_plain(
        lambda x, w: norm_linear(x, w, norm="rms", activation="silu"), inputs, normal(30, out), ["x", "weight"]
    )


@needs_kernels
@pytest.mark.usefixtures("way")
def test_a_nan_stays_in_its_row_and_reaches_the_weight() -> None:
    x, weight = normal(100, 50).float(), normal(50, 20).float().requires_grad_()
    x[70, 3] = torch.nan
    x.requires_grad_()
    out = norm_linear(x, weight, norm="layer", activation="silu")
    grad_x, grad_weight = torch.autograd.grad(out, [x, weight], torch.ones_like(out))
    for rows in (out, grad_x):
        assert rows[70].isnan().all()
        assert rows.isnan().any(dim=1).sum() == 1
    assert grad_weight.isnan().all()


@needs_kernels
def test_a_strided_weight_is_accepted() -> None:
    x, weight = normal(30, 12).float().requires_grad_(), normal(20, 12).float().t().requires_grad_()
    strided = norm_linear(x, weight, norm="layer", activation="silu")
    packed = norm_linear(x, weight.contiguous(), norm="layer", activation="silu")
    grads = torch.autograd.grad(strided.sum(), [x, weight])
    assert torch.equal(strided, packed)
    torch.testing.assert_close(grads, torch.autograd.grad(packed.sum(), [x, weight]), rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_strided_rows_are_read_in_place(norm: str) -> None:
    wide = normal(40, 100).float()
    weight = normal(30, 20).float()
    for x in (wide[:, 10:40], wide[::2, 10:40], wide[:, 10:70:2]):
        out = norm_linear(x, weight, norm=norm, activation="silu")  # type: ignore[arg-type]
        assert torch.equal(out, norm_linear(x.contiguous(), weight, norm=norm, activation="silu"))  # type: ignore[arg-type]


@needs_kernels
@pytest.mark.usefixtures("way")
def test_the_gradient_may_be_strided() -> None:
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
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("norm", "activation"), [("layer", "silu"), ("none", "silu"), ("rms", "none")])
def test_the_operator_obeys_the_rules_of_torch_library(norm: str, activation: str) -> None:
    arguments = (normal(6, 5).float().requires_grad_(), normal(5, 4).float().requires_grad_(), None)
    torch.library.opcheck(torch.ops.turbogr.norm_linear.default, (*arguments, [3, 1], norm, activation, 1e-6))


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_a_piece_that_is_not_used_has_no_gradient(activation: Activation) -> None:
    x, weight = normal(20, 6).float().requires_grad_(), normal(6, 9).float()
    first, _, last = norm_linear_pieces(x, weight, widths=[4, 2, 3], norm="layer", activation=activation)
    whole = norm_linear(x, weight, norm="layer", activation=activation)
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
