"""Operators in bf16: the compiled ones against the definition and plain PyTorch in bf16, and what they store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.judging import assert_independent_of_threads, needs_kernels
from turbogr.ops import RelativeBias, bf16_unit, registry
from turbogr.ops.gated_linear import reference as gated_linear
from turbogr.ops.gated_mlp import reference as gated_mlp
from turbogr.ops.jagged_attention import reference as attention
from turbogr.ops.keyed_dropout import reference as keyed_dropout
from turbogr.ops.norm_linear import reference as norm_linear
from turbogr.ops.precision import define_in_bf16
from turbogr.random import Dropout

T = 70
_RANDOM = torch.Generator().manual_seed(0)
KEYS = torch.arange(T)
OFFSETS = torch.tensor([0, 50, 50, T])
TIMES = torch.randint(0, 10**6, (T,), generator=_RANDOM).sort()[0]
DROPOUT = Dropout(0.3, 5)


def normal(*size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*size, generator=_RANDOM)


class Case(NamedTuple):
    """An operator as its reference takes it: `make(activations, parameters)` are the arguments."""

    name: str
    reference: Callable[..., Any]
    activations: list[Tensor]
    parameters: list[Tensor]
    make: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Any, ...]]


def _bias(p: Sequence[Tensor]) -> RelativeBias:
    return RelativeBias(TIMES.roll(-1), TIMES, p[0], p[1])


def _linear(name: str, inner: int) -> list[Case]:
    return [
        Case(
            f"norm_linear{name}",
            norm_linear.norm_linear,
            [normal(T, 24)],
            [normal(24, inner, scale=0.2), normal(inner, scale=0.2)],
            lambda x, p: (x[0], p[0], p[1], [16, inner - 16], "layer", "silu", 1e-6),
        ),
        Case(
            f"gated_linear{name}",
            gated_linear.gated_linear,
            [normal(T, inner), normal(T, inner), normal(T, 24)],
            [normal(inner, 24, scale=0.2), normal(24, scale=0.2)],
            lambda x, p: (*x, p[0], p[1], "rms", 1e-6, DROPOUT, KEYS),
        ),
        Case(
            f"gated_mlp{name}",
            gated_mlp.gated_mlp,
            [normal(T, 24)],
            [normal(24, inner, scale=0.2), normal(24, inner, scale=0.2), normal(inner, 24, scale=0.05)],
            lambda x, p: (x[0], *p, "rms", 1e-6, DROPOUT, KEYS),
        ),
    ]


HEADS = [normal(T, 2, 12), normal(T, 2, 12), normal(T, 2, 20)]
TABLES = [normal(103, scale=0.3), normal(33, scale=0.3)]
CASES = [
    *_linear("", 40),
    *_linear(" large", 6000),  # weights that do not stay in cache take another path
    Case("keyed_dropout", keyed_dropout.keyed_dropout, [normal(T, 24)], [], lambda x, p: (x[0], DROPOUT, KEYS)),
    Case(
        "hstu_attention",
        attention.hstu_attention,
        HEADS,
        TABLES,
        lambda x, p: (*x, OFFSETS, None, *_bias(p), 52, 1.0),
    ),
    Case(
        "fuxi_attention",
        attention.fuxi_attention,
        HEADS,
        TABLES,
        lambda x, p: (*x, OFFSETS, None, *_bias(p), 52, False),
    ),
    Case("softmax_attention", attention.softmax_attention, HEADS, [], lambda x, p: (*x, OFFSETS, None, 0.3)),
]
by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def differentiate(case: Case, function: Callable[..., Any], activation: torch.dtype, parameter: torch.dtype) -> Any:
    """Outputs and the gradients of activations and parameters, from the same numbers, as they come."""
    x = [tensor.bfloat16().to(activation).requires_grad_() for tensor in case.activations]
    p = [tensor.to(parameter).requires_grad_() for tensor in case.parameters]
    out = function(*case.make(x, p))
    outs = out if isinstance(out, list) else [out]
    random = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=random).bfloat16().to(out.dtype) for out in outs]
    return [out.detach() for out in outs], torch.autograd.grad(outs, [*x, *p], grads), grads


def in_bf16(case: Case, backend: str) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    with registry.backend(backend):
        function = registry.choose(case.name.split()[0], torch.device("cpu"), torch.bfloat16)
        outs, grads, _ = differentiate(case, function, torch.bfloat16, torch.float32)
    return outs, grads


@pytest.fixture(params=bf16_unit.UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every unit for bf16 that works here, and none."""
    reason = bf16_unit.problem(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    with bf16_unit.using(request.param):
        yield request.param


@needs_kernels
@by_name
def test_the_error_is_at_most_twice_that_of_plain_bf16(case: Case, unit: str) -> None:
    exact_outs, exact_grads, _ = differentiate(case, case.reference, torch.float64, torch.float64)
    plain_outs, plain_grads, _ = differentiate(case, case.reference, torch.bfloat16, torch.bfloat16)
    for backend in ("cpu", "reference"):
        outs, grads = in_bf16(case, backend)
        ours, plain, exact = [*outs, *grads], [*plain_outs, *plain_grads], [*exact_outs, *exact_grads]
        for number, (o, p, e) in enumerate(zip(ours, plain, exact, strict=True)):
            # Plain bf16 may be exact by luck (dropout alone multiplies by one number).
            floor = 2**-8 * float(e.abs().max())
            allowed = max(2 * float((p.double() - e).abs().max()), floor)
            assert float((o.double() - e).abs().max()) <= allowed, (backend, number)


@needs_kernels
@by_name
def test_the_compiled_operator_is_its_definition_but_for_rounding(case: Case, unit: str) -> None:
    """Outputs round once; gradients come from stored activations, which are rounded too, and a unit for bf16 gets
    factors that are."""
    outs, grads = in_bf16(case, "cpu")
    defined_outs, defined_grads = in_bf16(case, "reference")
    for ours, defined in zip([*outs, *grads], [*defined_outs, *defined_grads], strict=True):
        assert ours.dtype == defined.dtype
        assert float((ours.float() - defined.float()).norm()) <= 2**-7 * float(defined.float().norm())


@needs_kernels
@by_name
def test_activations_are_bf16_and_gradients_of_parameters_fp32(case: Case, unit: str) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outs, grads = in_bf16(case, "cpu")
    count = len(case.activations)
    assert {out.dtype for out in outs} == {torch.bfloat16}
    assert {grad.dtype for grad in grads[:count]} == {torch.bfloat16}
    assert {grad.dtype for grad in grads[count:]} <= {torch.float32}
    parameters = {tuple(tensor.shape) for tensor in case.parameters}
    for tensor in kept:
        if tensor.is_floating_point() and tensor.dtype != torch.bfloat16 and tuple(tensor.shape) not in parameters:
            assert tensor.numel() <= 2 * T, f"an activation of shape {tuple(tensor.shape)} is stored in fp32"


@needs_kernels
@by_name
def test_the_number_of_threads_changes_no_bit(case: Case) -> None:
    if "large" in case.name and bf16_unit.in_use() == "none":
        pytest.skip("without a unit for bf16 these products are PyTorch's, whose sums may depend on threads")

    def run() -> list[Tensor]:
        outs, grads = in_bf16(case, "cpu")
        return [*outs, *grads]

    assert_independent_of_threads(run)


def test_matrices_are_rounded_and_other_parameters_are_not() -> None:
    seen: list[Tensor] = []

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        seen.extend([x, weight, bias])
        return x @ weight + bias

    third = torch.tensor([[1 / 3]])
    weight, bias = third.clone().requires_grad_(), third[0].clone().requires_grad_()
    out = define_in_bf16(reference)(torch.ones(1, 1, dtype=torch.bfloat16), weight, bias)
    assert [tensor.dtype for tensor in seen] == [torch.float32] * 3
    assert seen[1].item() == third.bfloat16().item() != third.item()
    assert seen[2].item() == third.item()
    assert out.dtype == torch.bfloat16
    # A gradient that bf16 cannot hold shows that parameters get theirs unrounded.
    out.backward(torch.full((1, 1), 1.0, dtype=torch.bfloat16))
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
