"""Products of a projection by every provider: values, strides, edges, threads, and how a choice is written."""

from __future__ import annotations

from itertools import product as combinations

import pytest
import torch
from torch import Tensor

from tests.ops.judging import assert_independent_of_threads, instruction_set, needs_kernels
from turbogr.errors import UserError
from turbogr.ops import native, projections, registry
from turbogr.ops.norm_linear import norm_linear
from turbogr.ops.projections import parse_choice, uniform, write_choice

USABLE = [provider for provider in projections.PROVIDERS if projections.problem(provider) is None]


def computes_in_fp32(provider: str) -> bool:
    """False for oneDNN's switch on a processor with AMX, where `gemm_choice` refuses it."""
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    with projections.using(uniform(provider)):
        found = projections.forward(left, right)
    return bool((found - left.double() @ right.double()).abs().max() < 1e-3)


EXACT = [provider for provider in USABLE if computes_in_fp32(provider)]
ISAS = native.available_isas() if native.BACKEND.problem is None else []


def assert_exact(found: Tensor, *factors: Tensor, start: Tensor | None = None) -> None:
    """Compare with the product in fp64; its error may be a few times that of plain fp32."""
    left, right = (factor.double() for factor in factors)
    exact = left @ right + (0 if start is None else start.double())
    scale = (left.abs() @ right.abs()).max() if found.numel() and left.shape[1] else 0.0
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert float((found - exact).abs().max() if found.numel() else 0.0) <= 1e-6 * float(scale) + 1e-6


@pytest.mark.parametrize("provider", EXACT)
@pytest.mark.parametrize("rows", [0, 1, 100])
def test_the_three_products(provider: str, rows: int) -> None:
    x, weight, grad = torch.randn(rows, 65), torch.randn(65, 70), torch.randn(rows, 70)
    bias, residual = torch.randn(70), torch.randn(rows, 70)
    with projections.using(uniform(provider)):
        assert_exact(projections.forward(x, weight), x, weight)
        assert_exact(projections.forward(x, weight, bias), x, weight, start=bias)
        assert_exact(projections.forward(x, weight, residual), x, weight, start=residual)
        out = torch.empty(rows, 70)
        assert projections.forward(x, weight, bias, out=out) is out
        assert_exact(out, x, weight, start=bias)
        assert_exact(projections.input_gradient(grad, weight), grad, weight.t())
        assert_exact(projections.weight_gradient(x, grad, weight), x.t(), grad)


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 1, 1), (13, 7, 33), (12, 256, 32), (97, 257, 63), (5, 1100, 3)]
)
def test_our_kernel_with_every_order_of_its_operands(isa: str, rows: int, depth: int, columns: int) -> None:
    a, b, start = torch.randn(rows, depth), torch.randn(depth, columns), torch.randn(rows, 2 * columns)[:, ::2]
    with instruction_set(isa):
        for left, right in combinations((a, a.t().contiguous().t()), (b, b.t().contiguous().t())):
            assert_exact(projections._by_turbogr(left, right, start, None), a, b, start=start)
        wide = torch.full((rows, columns + 5), 7.0)
        projections._by_turbogr(a, b, None, wide[:, :columns])
        assert_exact(wide[:, :columns], a, b)
        assert torch.equal(wide[:, columns:], torch.full((rows, 5), 7.0))
        strided = torch.randn(2 * rows, 3 * depth)[::2, ::3]
        assert_exact(projections._by_turbogr(strided, b, None, None), strided, b)


@needs_kernels
def test_our_kernel_does_not_depend_on_threads_or_on_other_rows() -> None:
    x, weight, grad = torch.randn(300, 130), torch.randn(130, 100), torch.randn(300, 100)
    with projections.using(uniform("turbogr")):
        assert_independent_of_threads(
            lambda: [
                projections.forward(x, weight),
                projections.input_gradient(grad, weight),
                projections.weight_gradient(x, grad, weight),
            ]
        )
        assert torch.equal(projections.forward(x[17:40], weight), projections.forward(x, weight)[17:40])


@pytest.mark.parametrize("provider", EXACT)
def test_a_norm_linear_with_a_large_weight_is_computed_by_the_provider(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(20, 260, requires_grad=True)
    weight = (torch.randn(260, 512) / 16).requires_grad_()  # too large for the fused kernel
    used = []
    for product in projections.PRODUCTS:
        function = getattr(projections, product)
        monkeypatch.setattr(
            projections, product, lambda *a, f=function, p=product, **k: (used.append(p), f(*a, **k))[1]
        )
    results = []
    for backend in ("reference", "cpu"):
        with projections.using(uniform(provider)), registry.backend(backend):
            out = norm_linear(x, weight, norm="layer", activation="silu")
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert native.BACKEND.problem is not None or sorted(used) == sorted(projections.PRODUCTS)


def test_onednn_leaves_the_switch_as_it_was() -> None:
    if "onednn" not in USABLE:
        pytest.skip("this PyTorch has no oneDNN")
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(RuntimeError), projections.using(uniform("onednn")):
        projections.forward(torch.ones(2, 3), torch.ones(4, 5))
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_choice_is_written_and_read() -> None:
    assert write_choice(parse_choice("turbogr")) == "turbogr"
    text = "medium=torch/onednn/turbogr,large=torch/torch/onednn"
    choice = parse_choice(text)
    assert choice["medium", "weight_gradient"] == "turbogr" and choice["large", "forward"] == "torch"
    assert write_choice(choice) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mlk", "unknown 'mlk', choose from torch, onednn, turbogr"),
        ("medium=torch/torch/torch", "large=... is missing"),
        ("medium=torch,large=torch", "must name 3 providers"),
        ("small=torch/torch/torch", "unknown 'small'"),
    ],
)
def test_another_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_choice(text)


def test_a_provider_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "problem", lambda provider: "it is not built" if provider == "turbogr" else None)
    with pytest.raises(UserError, match="products by turbogr cannot be computed on this machine: it is not built"):
        projections.use(uniform("turbogr"))
    assert projections.in_use() == uniform("torch")
