"""Triton's passes over rows in the interpreter: projections, dropout, look-ups and updates of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.judging import plain_pytorch
from turbogr import ops
from turbogr.ops import registry, triton_passes
from turbogr.random import Dropout, random_words

FLOAT, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float64
DROP = Dropout(0.3, 2**62 + 2**31 + 5)
_RANDOM = torch.Generator().manual_seed(0)


def normal(*size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*size, dtype=DOUBLE, generator=_RANDOM)


T = 11
KEYS = torch.cat([torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32]), torch.arange(T - 5) * 7919])
INDEX = torch.tensor([4, 0, 4, 4, 2, 0, 4, 6, 4, 4, 4])
POSITIONS = torch.arange(T) % 4


class Case(NamedTuple):
    """`compute(*activations, *parameters)`; where `views`, activations are columns of wider tensors."""

    compute: Callable[..., Any]
    activations: list[Tensor]
    parameters: list[Tensor]
    views: bool = False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Any, activation: Any) -> list[Tensor]:
    return ops.norm_linear_pieces(x, weight, bias, widths=[5, 18], norm=norm, activation=activation)


def one_piece(x: Tensor, weight: Tensor) -> Tensor:
    return ops.norm_linear(x, weight, norm="rms", activation="none")


def first_piece(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(x, weight, bias, norm="layer", activation="silu")[0]


def gated(x: Tensor, gate: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    norm: Any = "layer" if bias is None else "rms"
    return ops.gated_linear(x, gate, residual, weight, bias, norm=norm, dropout=DROP, keys=KEYS)


def ungated_norm(x: Tensor, gate: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return ops.gated_linear(x, gate, residual, weight, norm="none")


def mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return ops.gated_mlp(x, a, b, c, norm="rms", dropout=DROP, keys=KEYS)


W, B = normal(20, 23, scale=0.3), normal(23, scale=0.3)
CASES = {
    "norm_linear": Case(
        lambda *x: linear(*x, norm="layer", activation="silu"), [normal(T, 20)], [W, B], views=True
    ),
    "norm_linear without bias": Case(
        lambda *x: linear(*x, norm="none", activation="silu"), [normal(T, 20)], [W]
    ),
    "norm_linear without activation": Case(
        lambda *x: linear(*x, norm="rms", activation="none"), [normal(T, 20)], [W, B]
    ),
    "norm_linear in one piece": Case(one_piece, [normal(T, 20)], [W]),
    "norm_linear with a piece that is not used": Case(first_piece, [normal(T, 20)], [W, B]),
    "gated_linear": Case(gated, [normal(T, 20), normal(T, 20), normal(T, 23)], [W], views=True),
    "gated_linear with bias": Case(gated, [normal(T, 20), normal(T, 20), normal(T, 23)], [W, B]),
    "gated_linear without norm": Case(ungated_norm, [normal(T, 20), normal(T, 20), normal(T, 23)], [W]),
    "gated_mlp": Case(mlp, [normal(T, 20)], [W, normal(20, 23, scale=0.3), normal(23, 20, scale=0.2)], views=True),
    "keyed_dropout": Case(lambda x: ops.keyed_dropout(x, DROP, KEYS), [normal(T, 300)], [], views=True),
    "a wide row": Case(one_piece, [normal(3, 1100)], [normal(1100, 2)]),
    "no rows": Case(mlp, [normal(0, 4)], [normal(4, 3), normal(4, 3), normal(3, 4)]),
    "embed": Case(
        lambda rows, p: ops.embed(rows, INDEX, p, POSITIONS, scale=3.0, dropout=DROP, keys=KEYS),
        [],
        [normal(7, 20), normal(4, 20)],
    ),
    "look_up_rows": Case(lambda rows: ops.look_up_rows(rows, INDEX.int(), [3, 0, 8]), [], [normal(7, 300)]),
    "look_up_rows with a piece that is not used": Case(
        lambda rows: ops.look_up_rows(rows, INDEX, [3, 8])[1], [], [normal(7, 20)]
    ),
}  # fmt: skip


def run(case: Case, backend: str, dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor]:
    """Outputs and all gradients; activations are the same numbers, rounded to bf16, in every type."""
    leaves = [x.to(HALF).to(dtype).requires_grad_() for x in case.activations]
    weights = [x.to(parameters).requires_grad_() for x in case.parameters]
    given = [torch.cat([x, x], 1)[:, : x.shape[1]] if case.views else x for x in leaves]
    keys = KEYS[: given[0].shape[0]] if given else KEYS
    with registry.backend(backend), pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "KEYS", keys)
        found = case.compute(*given, *weights)
    outs: Sequence[Tensor] = [found] if isinstance(found, Tensor) else found
    random = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=random).to(HALF).to(out.dtype) for out in outs]
    found_grads = torch.autograd.grad(outs, [*leaves, *weights], grads)
    for grad, leaf in zip(found_grads, [*leaves, *weights], strict=True):
        assert grad.dtype == leaf.dtype
    return [x.detach().double() for x in (*outs, *found_grads)]


def assert_close(exact: list[Tensor], plain: list[Tensor], ours: list[Tensor], dtype: torch.dtype) -> None:
    """At most twice the error of plain PyTorch of the same type, both against float64."""
    smallest = 1e-6 if dtype == FLOAT else 4e-3
    for number, (e, p, o) in enumerate(zip(exact, plain, ours, strict=True)):
        assert o.shape == e.shape, number
        if e.numel():
            floor = smallest * max(1.0, float(e.abs().max()))
            assert float((o - e).abs().max()) <= 2 * float((p - e).abs().max()) + floor, number


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, FLOAT) for name in CASES),
    *((name, HALF) for name, case in CASES.items() if case.activations),
])  # fmt: skip
def test_outputs_and_gradients(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    exact = run(case, "reference", DOUBLE, DOUBLE)
    with plain_pytorch():
        plain = run(case, "reference", dtype, dtype)
    ours = run(case, "triton", dtype, FLOAT)
    assert_close(exact, plain, ours, dtype)


@pytest.mark.parametrize("name", ["gated_linear with bias", "gated_mlp", "embed"])
def test_the_same_bits_twice(name: str) -> None:
    first, second = (run(CASES[name], "triton", FLOAT, FLOAT) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63 - 1])
@pytest.mark.parametrize("rate", [2.0**-32, 0.5, 1 - 2.0**-32])
def test_the_same_elements_are_dropped_as_on_the_cpu(seed: int, rate: float) -> None:
    x = torch.ones(T, 40)
    results = []
    for backend in ("reference", "triton"):
        with registry.backend(backend):
            results.append(ops.keyed_dropout(x, Dropout(rate, seed), KEYS))
    assert torch.equal(results[0] != 0, results[1] != 0)
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**16, 2**31 - 1])
def test_integers_are_those_of_the_cpu(bound: int) -> None:
    results = []
    for backend in ("reference", "triton"):
        with registry.backend(backend):
            results.append([ops.random_integers(KEYS, seed, 300, bound) for seed in (3, 2**63 - 1)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype == torch.int32
        assert torch.equal(ours, theirs)


def test_the_upper_word_of_a_product_is_exact_in_32_bits() -> None:
    """What carries are rare: the integers of many words with the largest bound need all of them."""
    keys = torch.arange(500)
    bound = 2**31 - 1
    words = random_words(keys, 9, 4)
    expected = [int(h) * bound + ((int(low) * bound) >> 32) >> 32 for h, low in words.view(-1, 2).tolist()]
    with registry.backend("triton"):
        assert ops.random_integers(keys, 9, 2, bound).flatten().tolist() == expected


def update(backend: str, dtype: torch.dtype, kind: str, places: Tensor | None, width: int = 40) -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    state = [torch.rand(9, width, dtype=DOUBLE, generator=random).to(dtype) for _ in range(3)]
    index = torch.tensor([7, 0, 3])
    num = 3 if places is None else places.shape[0]
    grad = torch.randn(num, width, dtype=DOUBLE, generator=random).to(dtype)
    with registry.backend(backend):
        if kind == "adam":
            ops.row_adam_(
                *state, index, grad, step=3, lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, places=places
            )
        else:
            ops.row_adagrad_(*state[:2], index, grad, lr=0.05, eps=1e-10, places=places)
    return [x.double() for x in state]


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("places", [None, torch.tensor([2, 0, 2, 1, 2, 0] + [1] * 10)], ids=["summed", "duplicates"])
@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_updates_of_rows(kind: str, places: Tensor | None, backend: str) -> None:
    results = [update(*how, kind, places) for how in (("reference", DOUBLE), ("reference", FLOAT), (backend, FLOAT))]
    assert_close(*results, FLOAT)
    others = torch.ones(9, dtype=torch.bool)
    others[[7, 0, 3]] = False
    before = update("reference", FLOAT, kind, torch.tensor([], dtype=torch.int64))
    assert torch.equal(results[2][0][others], before[0][others])


def test_a_place_outside_the_index_is_refused() -> None:
    for backend in ("reference", "cpu", "triton"):
        with pytest.raises(ValueError, match="places holds 3"):
            update(backend, FLOAT, "adagrad", torch.tensor([3]))


def test_rows_that_no_program_has_room_for_are_refused() -> None:
    with registry.backend("triton"), pytest.raises(ValueError, match=r"20000 numbers.*up to 8192"):
        ops.norm_linear(torch.zeros(1, 20000), torch.zeros(20000, 1), norm="rms", activation="none")


def test_the_operators_obey_the_rules_of_torch_library() -> None:
    x, w, bias, rows = (y.float().requires_grad_() for y in (normal(3, 4), normal(4, 4), normal(4), normal(5, 4)))
    keys, index, at = torch.arange(3), torch.tensor([1, 1, 4]), torch.tensor([0, 1, 0])
    turbogr = torch.ops.turbogr
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for operator, arguments in (
        (turbogr.norm_linear_triton, (x, w, bias, [1, 3], "layer", "silu", 1e-6)),
        (turbogr.gated_linear_triton, (x, x, x, w, bias, keys, "rms", 1e-6, 0.3, 5)),
        (turbogr.gated_mlp_triton, (x, w, w, w, keys, "rms", 1e-6, 0.3, 5)),
        (turbogr.keyed_dropout_triton, (x, keys, 0.3, 5)),
        (turbogr.embed_triton, (rows, index, rows, at, keys, 2.0, 0.3, 5)),
        (turbogr.look_up_rows_triton, (rows, index, [1, 2])),
        (turbogr.random_integers_triton, (keys, 5, 3, 10)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=checks)
    state = [torch.rand(5, 4) for _ in range(3)]
    torch.library.opcheck(
        turbogr.row_adam_triton_.default,
        (*state, index[1:], torch.rand(3, 4), at, 1, 0.1, 0.9, 0.98, 1e-8, 0.0),
        test_utils=checks[:2],
    )
    torch.library.opcheck(
        turbogr.row_adagrad_triton_.default,
        (*state[:2], index[1:], torch.rand(2, 4), None, 0.1, 1e-8),
        test_utils=checks[:2],
    )


def test_torch_compile_sees_through_them() -> None:
    case = CASES["gated_mlp"]
    leaves = [x.float().requires_grad_() for x in (*case.activations, *case.parameters)]
    with registry.backend("triton"):
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*leaves), mlp(*leaves))


def test_beside_a_device_the_host_draws_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.backend=triton` on a device: negatives and tables in host memory are the compiled kernels' work."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with registry.backend("triton"):
        for operator in ("random_integers", "row_adam_", "row_adagrad_", "look_up_rows", "embed"):
            backends = [registry._decide(operator, torch.device(name), FLOAT).backend.name for name in ("cpu", "cuda")]
            assert backends[0] != backends[1] == "triton", operator


def test_places_are_sorted_by_row_and_stay_in_order() -> None:
    segments = triton_passes.sort_by_row(torch.tensor([2, 0, 2, 2, 0]), 4)
    assert segments.order.tolist() == [1, 4, 0, 2, 3]
    assert segments.bounds.tolist() == [0, 2, 2, 5, 5]
