"""Units for bf16: their products against float64, in every layout; threads; and a unit that is not there."""

from __future__ import annotations

from itertools import product as combinations

import pytest
import torch
from torch import Tensor

from tests.ops.judging import assert_independent_of_threads, needs_kernels
from turbogr.errors import UserError
from turbogr.ops import bf16_products, bf16_unit, native

UNITS = [unit for unit in bf16_unit.UNITS if unit != "none" and bf16_unit.problem(unit) is None]
TYPES = (torch.float32, torch.bfloat16)
needs_a_unit = pytest.mark.skipif(not UNITS, reason="this processor has no unit for bf16, or it does not work here")


def multiply(a: Tensor, b: Tensor, start: Tensor | None, dtype: torch.dtype) -> Tensor:
    return bf16_products.multiply(a, b, start, torch.full((a.shape[0], b.shape[1]), 7.0, dtype=dtype))


def assert_product(found: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None) -> None:
    """Sums are in fp32, and a result in bf16 is rounded once."""
    left, right = (factor.to(torch.bfloat16).double() for factor in (a, b))
    exact = left @ right + (0.0 if start is None else start.double())
    bound = 1e-6 * (left.abs() @ right.abs() + (0.0 if start is None else start.double().abs())) + 1e-30
    if found.dtype == torch.bfloat16:
        bound = bound + 2**-8 * exact.abs()
    assert torch.all((found.double() - exact).abs() <= bound)


def in_both_orders(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return matrix, matrix.t().contiguous().t()


@needs_a_unit
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 1, 1), (33, 45, 17), (300, 1100, 70), (700, 64, 40), (64, 2500, 290), (70, 2000, 24), (2, 0, 3)],
)
def test_every_layout_and_type(unit: str, rows: int, depth: int, columns: int) -> None:
    bias, residual = torch.randn(columns), torch.randn(rows, columns)
    with bf16_unit.using(unit):
        for left_type, right_type, result in combinations(TYPES, TYPES, TYPES):
            a, b = torch.randn(rows, depth).to(left_type), torch.randn(depth, columns).to(right_type)
            for left, right in combinations(in_both_orders(a), in_both_orders(b)):
                assert_product(multiply(left, right, None, result), a, b)
                assert_product(multiply(left, right, bias, result), a, b, bias)
                assert_product(multiply(left, right, residual.to(result), result), a, b, residual.to(result))


@needs_a_unit
@pytest.mark.parametrize("unit", UNITS)
def test_a_result_in_columns_of_a_wider_matrix_leaves_the_others_alone(unit: str) -> None:
    a, b, wide = torch.randn(50, 40), torch.randn(40, 35), torch.full((50, 60), 7.0)
    with bf16_unit.using(unit):
        bf16_products.multiply(a, b, None, wide[:, :35])
    assert_product(wide[:, :35], a, b)
    assert torch.equal(wide[:, 35:], torch.full((50, 25), 7.0))


@needs_a_unit
@pytest.mark.parametrize("unit", UNITS)
def test_nothing_depends_on_threads_or_on_other_rows(unit: str) -> None:
    x, weight = torch.randn(700, 130).to(torch.bfloat16), torch.randn(130, 100)
    grad = torch.randn(700, 100).to(torch.bfloat16)
    with bf16_unit.using(unit):
        assert_independent_of_threads(
            lambda: [multiply(x, weight, None, torch.bfloat16), multiply(x.t(), grad, None, torch.float32)]
        )
        whole = multiply(x, weight, None, torch.float32)
        assert torch.equal(multiply(x[17:40], weight, None, torch.float32), whole[17:40])


@needs_a_unit
@pytest.mark.parametrize("unit", UNITS)
def test_infinities_and_nan_reach_the_result(unit: str) -> None:
    a, b = torch.randn(40, 33), torch.randn(33, 40)
    a[3, 5], a[7, 32] = float("inf"), float("nan")
    with bf16_unit.using(unit):
        found = multiply(a, b, None, torch.bfloat16)
    assert not found[3].isfinite().any() and found[7].isnan().all()
    assert found[[i for i in range(40) if i not in (3, 7)]].isfinite().all()


def test_an_unknown_unit_and_one_that_is_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown unit"):
        bf16_unit.use("amxx")
    monkeypatch.setattr(bf16_unit, "problem", lambda unit: "this processor does not have it")
    with pytest.raises(UserError, match="does not have it"):
        bf16_unit.use("amx")


@needs_kernels
def test_the_environment_names_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bf16_unit.in_use()
    monkeypatch.setenv(bf16_unit.ENVIRONMENT, "none")
    monkeypatch.setattr(bf16_unit._State, "unit", None)
    try:
        assert bf16_unit.in_use() == "none"
    finally:
        bf16_unit.use(before)


@needs_kernels
def test_a_loop_that_crashes_in_the_child_does_not_crash_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_unit, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    bf16_unit.loop_fault.cache_clear()
    try:
        assert bf16_unit.loop_fault("generic") == "it crashed with SIGILL"
    finally:
        bf16_unit.loop_fault.cache_clear()


@needs_kernels
def test_kernels_of_another_instruction_set_have_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "isa", lambda: "generic")
    assert "generic" in str(bf16_unit.problem("amx"))
