"""Operators declared by an annotated function: the schema, the fake and the gradient follow from the names."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from turbogr.ops.declaration import derive_schema, set_gradient, torch_operator


class Inputs(NamedTuple):
    x: Tensor
    bias: Tensor | None
    factor: float


def test_the_schema_follows_from_the_annotations() -> None:
    def function(
        a: Tensor, b: Tensor | None, c: list[Tensor], d: list[Tensor | None], e: int, f: list[int], g: bool, h: str
    ) -> tuple[list[Tensor], Tensor]:
        raise NotImplementedError

    def in_place(state: Tensor, other: Tensor, inputs: Inputs) -> None:
        raise NotImplementedError

    assert derive_schema(function) == (
        "(Tensor a, Tensor? b, Tensor[] c, Tensor?[] d, int e, int[] f, bool g, str h) -> (Tensor[], Tensor)"
    )
    assert derive_schema(in_place, "state other") == (
        "(Tensor(a!) state, Tensor(b!) other, Tensor x, Tensor? bias, float factor) -> ()"
    )


def test_what_no_schema_can_say_is_refused() -> None:
    def odd(x: dict[str, int]) -> Tensor:
        raise NotImplementedError

    def with_default(x: Tensor, factor: float = 2.0) -> Tensor:
        raise NotImplementedError

    with pytest.raises(TypeError, match=r"'x' of .*odd is dict\[str, int\]"):
        derive_schema(odd)
    with pytest.raises(TypeError, match="must not have defaults"):
        derive_schema(with_default)


def empty_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0])


@torch_operator("turbogr_tests::affine", outputs="out sums", fake=empty_outputs)
def affine(residual: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """residual + factor · x² + bias, and the sums of the rows of x."""
    product = inputs.factor * inputs.x**2
    return residual + product + (0 if inputs.bias is None else inputs.bias), inputs.x.sum(1)


@torch_operator(
    "turbogr_tests::affine_backward", fake=lambda grad: (torch.empty_like(grad), grad.new_empty(grad.shape[1]))
)
def affine_backward(
    grad: Tensor, factor: float, sums: Tensor, needs_bias: bool, doubled: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    assert torch.equal(sums * 2, doubled.sum(1))
    assert num_rows == grad.shape[0]
    return grad * factor * doubled, grad.sum(0) if needs_bias else grad.new_full((grad.shape[1],), torch.nan)


set_gradient(
    affine,
    affine_backward,
    of="x bias",
    unchanged="residual",
    saved=lambda x: {"doubled": 2 * x, "num_rows": x.shape[0]},
)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("wanted", ["x", "bias", "residual"])
def test_the_gradient_takes_what_it_names(with_bias: bool, wanted: str) -> None:
    torch.manual_seed(0)
    leaves = {name: torch.randn(3, 4).requires_grad_(wanted == name) for name in ("residual", "x")}
    bias = torch.randn(4).requires_grad_(wanted == "bias") if with_bias else None
    if wanted == "bias" and bias is None:
        assert not affine(*leaves.values(), bias, 0.5)[0].requires_grad
        return
    out, sums = affine(*leaves.values(), bias, 0.5)
    assert not sums.requires_grad
    plain = leaves["residual"] + 0.5 * leaves["x"] ** 2 + (0 if bias is None else bias)
    leaf = {**leaves, "bias": bias}[wanted]
    assert leaf is not None
    grad = torch.randn(3, 4)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, grad), torch.autograd.grad(plain, leaf, grad))


def test_the_declared_operator_obeys_the_rules_of_torch_library() -> None:
    arguments = (torch.randn(3, 4), torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True), 0.5)
    torch.library.opcheck(torch.ops.turbogr_tests.affine.default, arguments)


def test_a_gradient_that_takes_something_unknown_is_refused() -> None:
    with pytest.raises(TypeError, match="takes doubled, num_rows, which"):
        set_gradient(affine, affine_backward, of="x bias")
