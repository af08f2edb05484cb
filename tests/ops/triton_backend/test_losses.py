"""Triton's kernels of the losses in the interpreter: forward and gradients against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.judging import with_gradients
from turbogr import ops
from turbogr.ops import registry, sampled_softmax
from turbogr.ops.sampled_softmax import Precision

FLOAT, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float64


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def integers(bound: int, *size: int) -> Tensor:
    return torch.randint(0, bound, size, generator=torch.Generator().manual_seed(3))


def assert_close(
    function: Callable[..., Tensor], queries: Tensor, rows: Tensor, grad: Tensor, dtype: torch.dtype = FLOAT
) -> None:
    """At most twice the error of plain PyTorch in fp32, or in bf16 of half a unit in the last place."""
    leaves = [x.to(dtype).double() for x in (queries, rows)]
    exact = with_gradients(function, leaves, grad, "reference", DOUBLE)
    plain = with_gradients(function, leaves, grad, "reference", dtype)
    ours = with_gradients(function, leaves, grad, "triton", dtype)
    smallest = 1e-6 if dtype == FLOAT else 4e-3
    for name, e, p, o in zip(("loss", "queries", "rows"), exact, plain, ours, strict=True):
        assert o.shape == e.shape, name
        if e.numel():
            floor = smallest * max(1.0, float(e.abs().max()))
            assert float((o - e).abs().max()) <= 2 * float((p - e).abs().max()) + floor, name


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("log_q", [True, False])
@pytest.mark.parametrize("shape", [(0, 4, 5, 3), (1, 0, 1, 1), (3, 3, 5, 8), (9, 65, 7, 50)], ids=str)
def test_candidates_of_each_position(shape: tuple[int, int, int, int], log_q: bool, normalize: bool) -> None:
    positions, count, num_rows, width = shape
    positives, negatives = integers(num_rows, positions), integers(num_rows, positions, count)
    corrections = normal(num_rows, seed=5) if log_q else None

    def loss(queries: Tensor, rows: Tensor) -> Tensor:
        given = None if corrections is None else corrections.to(rows.dtype)
        temperature = 0.05 if normalize else 2.0
        return sampled_softmax(
            queries, rows, positives, negatives, temperature=temperature, normalize=normalize, log_q=given
        )

    assert_close(loss, normal(positions, width), normal(num_rows, width, seed=1), normal(positions, seed=2))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("sizes", [[19], [1, 17]], ids=str)
def test_groups_share_candidates(sizes: list[int], precision: Precision) -> None:
    positions, count, num_rows, width = sum(sizes), 18, 11, 70
    groups = torch.tensor([0, *sizes]).cumsum(0)
    positives, negatives = integers(num_rows, positions), integers(num_rows, len(sizes), count)
    corrections = normal(num_rows, seed=5)

    def loss(queries: Tensor, rows: Tensor) -> Tensor:
        return sampled_softmax(
            queries, rows, positives, negatives, temperature=0.1, log_q=corrections.to(rows.dtype), groups=groups,
            precision=precision,
        )  # fmt: skip

    assert_close(loss, normal(positions, width), normal(num_rows, width, seed=1), normal(positions, seed=2))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_narrow_candidates(precision: Precision, normalize: bool) -> None:
    positives, negatives = integers(9, 5), integers(9, 5, 12)

    def loss(queries: Tensor, rows: Tensor) -> Tensor:
        temperature = 0.1 if normalize else 2.0
        return sampled_softmax(
            queries, rows, positives, negatives, temperature=temperature, normalize=normalize, precision=precision
        )

    assert_close(loss, normal(5, 33), normal(9, 33, seed=1), normal(5, seed=2))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", [(0, 5, 3), (17, 33, 50), (5, 1, 4)], ids=str)
def test_full_softmax(shape: tuple[int, int, int], normalize: bool) -> None:
    positions, num_rows, width = shape
    targets = integers(num_rows, positions)

    def loss(queries: Tensor, rows: Tensor) -> Tensor:
        return ops.full_softmax(queries, rows, targets, temperature=0.3 if normalize else 2.0, normalize=normalize)

    assert_close(loss, normal(positions, width), normal(num_rows, width, seed=1), normal(positions, seed=2))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("count", [0, 40])
def test_sampled_logits(count: int, normalize: bool) -> None:
    index = integers(7, 6, count)

    def logits(queries: Tensor, rows: Tensor) -> Tensor:
        return ops.sampled_logits(queries, rows, index, temperature=0.3, normalize=normalize)

    assert_close(logits, normal(6, 20), normal(7, 20, seed=1), normal(6, count, seed=2))


@pytest.mark.parametrize("shared", [False, True])
def test_bf16(shared: bool) -> None:
    groups = torch.tensor([0, 3, 8]) if shared else None
    positives, negatives = integers(9, 8), integers(9, 2 if shared else 8, 6)

    def loss(queries: Tensor, rows: Tensor) -> Tensor:
        return sampled_softmax(queries, rows, positives, negatives, temperature=0.5, groups=groups)

    assert_close(loss, normal(8, 20), normal(9, 20, seed=1), normal(8, seed=2), HALF)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered in cast")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_nan_reaches_the_loss_and_vectors_of_zeros_are_harmless(precision: Precision, shared: bool) -> None:
    queries, rows = normal(4, 5).float(), normal(6, 5, seed=1).float()
    rows[5], rows[3, 1] = 0, float("nan")
    groups = torch.tensor([0, 2, 4]) if shared else None
    negatives = torch.tensor([[1, 5, 3], [1, 5, 2]] if shared else [[1, 5, 3], [1, 3, 2], [1, 5, 2], [5, 4, 2]])
    queries.requires_grad_()
    with registry.backend("triton"):
        loss = sampled_softmax(
            queries, rows, torch.tensor([0, 1, 0, 4]), negatives, temperature=0.1, groups=groups, precision=precision
        )
        loss[2:].sum().backward()
    assert loss.isnan().tolist() == [True, True, False, False]
    assert queries.grad is not None and queries.grad[2:].isfinite().all()


def test_the_same_bits_twice() -> None:
    positives, negatives = integers(5, 9), integers(5, 9, 30)

    def loss(queries: Tensor, rows: Tensor) -> Tensor:
        return sampled_softmax(queries, rows, positives, negatives, temperature=0.1)

    given = [normal(9, 20), normal(5, 20, seed=1)]
    first, second = (with_gradients(loss, given, normal(9, seed=2), "triton", FLOAT) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_operators_obey_the_rules_of_torch_library() -> None:
    queries, rows = (x.float().requires_grad_() for x in (normal(3, 4), normal(5, 4)))
    positives, negatives = integers(5, 3), integers(5, 3, 2)
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    library = torch.ops.turbogr
    given = (queries, rows, positives, negatives, None, None, 0.1, True, "fp32")
    torch.library.opcheck(library.sampled_softmax_triton.default, given, test_utils=checks)
    torch.library.opcheck(library.full_softmax_triton.default, (queries, rows, positives, 0.1, True), test_utils=checks)
    torch.library.opcheck(
        library.sampled_logits_triton.default, (queries, rows, negatives, 0.1, True), test_utils=checks
    )


def test_no_tensor_of_positions_candidates_and_columns_is_made() -> None:
    positions, count, width = 16, 64, 64
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, Tensor))
            return found

    positives, negatives = integers(20, positions), integers(20, positions, count)
    queries, rows = normal(positions, width).float().requires_grad_(), normal(20, width).float().requires_grad_()
    with registry.backend("triton"), Watch():
        sampled_softmax(queries, rows, positives, negatives, temperature=0.1).sum().backward()
    assert 0 < max(sizes) < positions * count * width // 8
