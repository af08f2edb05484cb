"""full_softmax: tiles of logits against the definition in fp64, judged by the error of plain fp32."""

from __future__ import annotations

import subprocess
import sys

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
from turbogr.ops import full_softmax, native, registry, sampled_softmax
from turbogr.ops.full_softmax import reference

SHAPES = [  # positions, rows, width
    (0, 5, 3),
    (1, 1, 1),
    (1, 5, 8),
    (63, 1, 50),
    (63, 5, 64),
    (95, 193, 2),
    (97, 1000, 50),
    (193, 191, 17),
    (400, 1000, 64),
    (63, 10_007, 8),
    (1, 10_007, 64),
    (63, 1000, 256),
]
NAMES = ("queries", "rows")


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(size)))


def targets_of(shape: tuple[int, int, int]) -> Tensor:
    """Some in the first tile, some in the last, several the same."""
    targets = torch.randint(0, shape[1], (shape[0],), generator=torch.Generator().manual_seed(1))
    targets[: min(3, shape[0])] = shape[1] - 1
    targets[shape[0] // 2 : shape[0] // 2 + 2] = 0
    return targets


def loss_of(shape: tuple[int, int, int], normalize: bool = True, temperature: float = 0.05):  # type: ignore[no-untyped-def]
    targets = targets_of(shape)
    return lambda queries, rows: full_softmax(queries, rows, targets, temperature=temperature, normalize=normalize)


def make_inputs(shape: tuple[int, int, int]) -> list[Tensor]:
    num_positions, num_rows, width = shape
    return [normal(num_positions, width), normal(num_rows, width, seed=1)]


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_forward_and_gradients(shape: tuple[int, int, int], normalize: bool) -> None:
    function = loss_of(shape, normalize, 0.05 if normalize else 2.0)
    assert_close_as_plain(function, make_inputs(shape), normal(shape[0]), NAMES)


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", [(63, 5, 7), (97, 400, 50), (200, 97, 130)], ids=str)
def test_every_instruction_set(isa: str, shape: tuple[int, int, int]) -> None:
    with instruction_set(isa):
        assert_close_as_plain(loss_of(shape), make_inputs(shape), normal(shape[0]), NAMES)


@needs_kernels
@pytest.mark.parametrize("shape", [(500, 700, 24), (20, 3000, 65)], ids=str)
def test_the_result_does_not_depend_on_the_threads(shape: tuple[int, int, int]) -> None:
    inputs, grad = make_inputs(shape), normal(shape[0])
    assert_independent_of_threads(lambda: with_gradients(loss_of(shape), inputs, grad, "cpu", torch.float32))


@needs_kernels
def test_a_position_does_not_depend_on_the_others() -> None:
    """The same bits whatever block of positions it is computed in, and zero gradients make no difference to rows."""
    queries, rows = (x.float() for x in make_inputs((700, 300, 20)))
    targets = targets_of((700, 300, 20))
    alone = full_softmax(queries[650:], rows, targets[650:], temperature=0.1)
    assert torch.equal(full_softmax(queries, rows, targets, temperature=0.1)[650:], alone)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_it_is_sampled_softmax_with_every_other_row_as_a_negative(backend: str) -> None:
    shape = (30, 50, 12)
    targets, negatives = targets_of(shape), torch.arange(50).expand(30, 50)
    inputs, grad = make_inputs(shape), normal(30)

    def sampled(queries: Tensor, rows: Tensor) -> Tensor:
        return sampled_softmax(queries, rows, targets, negatives, temperature=0.05)

    ours = with_gradients(loss_of(shape), inputs, grad, backend, torch.float32)
    theirs = with_gradients(sampled, inputs, grad, backend, torch.float32)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_definition_has_the_gradient_it_claims() -> None:
    inputs = [x.requires_grad_() for x in make_inputs((4, 5, 3))]
    targets = torch.tensor([0, 4, 4, 2])
    assert torch.autograd.gradcheck(lambda q, r: full_softmax(q, r, targets, temperature=0.5), inputs)


def test_the_definition_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (50, 30, 6)
    inputs, grad = make_inputs(shape), normal(50)
    whole = with_gradients(loss_of(shape), inputs, grad, "reference", torch.float64)
    monkeypatch.setattr(reference, "_LOGITS_AT_ONCE", 7 * 30)
    portions = with_gradients(loss_of(shape), inputs, grad, "reference", torch.float64)
    for one, other in zip(whole, portions, strict=True):
        torch.testing.assert_close(one, other)


@needs_kernels
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_logits_far_apart(order: str) -> None:
    """Logits from -3,000 to 3,000: each tile has a higher one than all before it, or none."""
    rows = torch.linspace(-3000, 3000, 1000, dtype=torch.float64)[:, None]
    rows = rows if order == "rising" else rows.flip(0)
    queries, targets = torch.tensor([[1.0], [-1.0], [0.0], [1e-3]], dtype=torch.float64), torch.tensor([0, 0, 5, 999])
    assert_close_as_plain(
        lambda q, r: full_softmax(q, r, targets, temperature=1.0, normalize=False),
        [queries, rows],
        torch.ones(4, dtype=torch.float64),
        NAMES,
    )


@needs_kernels
def test_one_row_has_no_loss_and_no_gradient() -> None:
    results = with_gradients(loss_of((9, 1, 5)), make_inputs((9, 1, 5)), normal(9), "cpu", torch.float32)
    assert all(float(x.abs().max()) == 0 for x in results)


@needs_kernels
def test_vectors_of_one_number() -> None:
    """Unit vectors of one number are 1 or -1, and their gradients zero: rounding is judged by the terms that cancel."""
    shape = (95, 193, 1)
    inputs = [x + x.sign() for x in make_inputs(shape)]
    assert_close_as_plain(loss_of(shape, False, 2.0), inputs, normal(95), NAMES)
    exact, ours = (
        with_gradients(loss_of(shape), inputs, torch.ones(95), backend, dtype)
        for backend, dtype in (("reference", torch.float64), ("cpu", torch.float32))
    )
    for e, o in zip(exact, ours, strict=True):
        torch.testing.assert_close(o, e, rtol=1e-6, atol=1e-4)


@needs_kernels
def test_short_vectors_are_divided_by_the_epsilon() -> None:
    inputs = make_inputs((5, 7, 6))
    inputs[0][1] = 0.0
    inputs[0][2] *= 1e-8
    inputs[1][3] = 0.0
    inputs[1][4] *= 1e-8
    assert_close_as_plain(loss_of((5, 7, 6)), inputs, normal(5), NAMES)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_nan_in_a_query_reaches_its_own_loss_only(backend: str) -> None:
    inputs = make_inputs((4, 300, 5))
    inputs[0][2, 1] = float("nan")
    loss, grad_queries, grad_rows = with_gradients(loss_of((4, 300, 5)), inputs, torch.ones(4), backend, torch.float32)
    assert loss.isnan().tolist() == [False, False, True, False]
    assert grad_queries.isnan().all(1).tolist() == [False, False, True, False]
    assert grad_rows.isnan().all()


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("row", [0, 250, 299])
def test_a_nan_in_a_row_reaches_every_loss(backend: str, row: int) -> None:
    inputs = make_inputs((4, 300, 5))
    inputs[1][row, 1] = float("nan")
    loss, grad_queries, _ = with_gradients(loss_of((4, 300, 5)), inputs, torch.ones(4), backend, torch.float32)
    assert loss.isnan().all() and grad_queries.isnan().all()


@needs_kernels
@pytest.mark.parametrize("needed", NAMES)
def test_only_one_side_needs_a_gradient(needed: str) -> None:
    inputs = [x.float() for x in make_inputs((40, 60, 10))]
    both = with_gradients(loss_of((40, 60, 10)), inputs, torch.ones(40), "cpu", torch.float32)
    leaves = [x.clone().requires_grad_(name == needed) for x, name in zip(inputs, NAMES, strict=True)]
    loss_of((40, 60, 10))(*leaves).sum().backward()
    grads = [x.grad for x in leaves]
    at = NAMES.index(needed)
    assert grads[1 - at] is None and torch.equal(grads[at].double(), both[1 + at])  # type: ignore[union-attr]


@needs_kernels
def test_operands_may_be_strided_and_targets_int32() -> None:
    queries, rows = (x.float() for x in make_inputs((30, 40, 10)))
    targets = targets_of((30, 40, 10))
    expected = full_softmax(queries, rows, targets, temperature=0.1)
    strided = full_softmax(
        torch.cat([queries, queries], 1)[:, 10:], rows.t().contiguous().t(), targets.int(), temperature=0.1
    )
    assert torch.equal(strided, expected)
    leaf = rows.clone().requires_grad_()
    full_softmax(queries, leaf, targets, temperature=0.1).sum().backward()  # the gradient comes in strides of zero
    assert leaf.grad is not None and leaf.grad.isfinite().all()


@needs_kernels
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_operator_obeys_the_rules_of_torch_library(needs_gradient: bool, normalize: bool) -> None:
    queries, rows = (x.float().requires_grad_(needs_gradient) for x in make_inputs((6, 5, 4)))
    arguments = (queries, rows, targets_of((6, 5, 4)), 0.1, normalize, needs_gradient)
    torch.library.opcheck(torch.ops.turbogr.full_softmax.default, arguments)


PEAK = """
import resource, torch
from turbogr.ops import full_softmax
queries, rows = (torch.randn(n, 64).requires_grad_() for n in (2048, 50_000))
targets = torch.randint(0, 50_000, (2048,))
full_softmax(queries[:64], rows[:64], targets[:64] % 64, temperature=0.1).sum().backward()
queries.grad, rows.grad = torch.zeros_like(queries), torch.zeros_like(rows)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
full_softmax(queries, rows, targets, temperature=0.1).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@needs_kernels
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the unit of ru_maxrss differs between systems")
def test_memory_is_a_tenth_of_that_of_the_logits() -> None:
    """Forward and backward together, in a process of their own; plain PyTorch holds three arrays of logits."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 0.1 * (4 * 2048 * 50_000)


def test_bad_arguments_are_refused() -> None:
    queries, rows = (x.float() for x in make_inputs((3, 5, 4)))
    targets = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="rows must have shape"):
        full_softmax(queries, rows[:, :3], targets, temperature=1.0)
    with pytest.raises(ValueError, match="targets must have shape"):
        full_softmax(queries, rows, targets[:2], temperature=1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        full_softmax(queries, rows, targets, temperature=0.0)
    with pytest.raises(ValueError, match="rows must be torch"):
        full_softmax(queries, rows.double(), targets, temperature=1.0)
    for backend in ("reference", "auto"):
        with registry.backend(backend), pytest.raises(ValueError, match="targets holds 5"):
            full_softmax(queries, rows, targets + 3, temperature=1.0)
