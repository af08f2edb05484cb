"""Linear attention: the kernels, in chunks and as recurrences, against the definition over all pairs."""

from __future__ import annotations

import math

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
from turbogr.ops import native, periodic_attention, registry, retention

# A chunk has 48 tokens.
CASES = {
    "no sequences": ([], 2, 4, 4),
    "only empty sequences": ([0, 0], 1, 4, 4),
    "one token": ([1], 1, 1, 1),
    "around a chunk": ([0, 47, 48, 49, 1, 96, 97], 2, 16, 8),
    "sizes that fill no vector": ([130, 3], 3, 7, 13),
    "many chunks": ([700], 1, 24, 40),
}


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def retained(lengths: list[int], heads: int, d: int, e: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and decays from slow to fast, and a gradient of the output."""
    num = sum(lengths)
    qkv = [normal(num, heads, size, seed=seed) / math.sqrt(d) for seed, size in enumerate((d, d, e))]
    return [*qkv, torch.logspace(-3, 0.3, heads, dtype=torch.float64)], normal(num, heads, e, seed=9)


def times_of(num: int, periods: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sines and cosines of angles, and gaps, of which some are 0 and some far beyond what is remembered."""
    random = torch.Generator().manual_seed(4)
    angles = 2 * math.pi * torch.rand(2, num, periods, generator=random, dtype=torch.float64)
    query, key = torch.stack([angles.sin(), angles.cos()], dim=3)
    gaps = 10 ** (-3 + 7 * torch.rand(num, periods, generator=random, dtype=torch.float64))
    gaps[::3] = 0
    gaps[1::3] = 0.1
    return query, key, gaps


def by_phase(lengths: list[int], periods: int, e: int) -> tuple[object, list[Tensor], Tensor]:
    num, offsets = sum(lengths), offsets_of(lengths)
    turns = times_of(num, periods)

    def attend(v: Tensor, log_decay: Tensor) -> Tensor:
        return periodic_attention(v, *(x.to(v.dtype) for x in turns), log_decay, offsets)

    inputs = [normal(num, 2 * periods, e, seed=1), -torch.logspace(-2, 0.5, periods, dtype=torch.float64)]
    return attend, inputs, normal(num, 2 * periods, e, seed=2)


@needs_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_retention_forward_and_gradients(case: tuple[list[int], int, int, int]) -> None:
    inputs, grad = retained(*case)
    offsets = offsets_of(case[0])
    assert_close_as_plain(lambda q, k, v, decay: retention(q, k, v, offsets, decay), inputs, grad, list("qkvd"))


@needs_kernels
def test_retention_without_decay() -> None:
    inputs, grad = retained([200], 1, 8, 16)
    inputs[3] = torch.zeros(1, dtype=torch.float64)
    offsets = offsets_of([200])
    assert_close_as_plain(lambda q, k, v, decay: retention(q, k, v, offsets, decay), inputs, grad, list("qkvd"))


@needs_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_periodic_attention_forward_and_gradients(case: tuple[list[int], int, int, int]) -> None:
    lengths, periods, _, e = case
    attend, inputs, grad = by_phase(lengths, periods, e)
    assert_close_as_plain(attend, inputs, grad, ["v", "log_decay"])  # type: ignore[arg-type]


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set(isa: str) -> None:
    lengths = [0, 1, 97, 130]
    inputs, grad = retained(lengths, 2, 20, 12)
    attend, others, other_grad = by_phase(lengths, 3, 5)
    with instruction_set(isa):
        assert_close_as_plain(
            lambda q, k, v, decay: retention(q, k, v, offsets_of(lengths), decay), inputs, grad, list("qkvd")
        )
        assert_close_as_plain(attend, others, other_grad, ["v", "log_decay"])  # type: ignore[arg-type]


@needs_kernels
def test_the_number_of_threads_changes_no_bit() -> None:
    lengths = [300, 5, 40, 61]
    inputs, grad = retained(lengths, 2, 8, 8)
    attend, others, other_grad = by_phase(lengths, 2, 4)

    def run() -> list[Tensor]:
        first = with_gradients(
            lambda q, k, v, decay: retention(q, k, v, offsets_of(lengths), decay), inputs, grad, "cpu", torch.float32
        )
        return first + with_gradients(attend, others, other_grad, "cpu", torch.float32)  # type: ignore[arg-type]

    assert_independent_of_threads(run)


@needs_kernels
def test_strided_rows() -> None:
    """q, k and v may be columns of one matrix, as a projection returns them."""
    q, k, v = normal(70, 2, 3 * 4, seed=5).float().split(4, dim=2)
    wide = normal(70, 2 * 3 * 4, seed=5).float()
    pieces = [wide[:, 8 * at : 8 * at + 8].view(70, 2, 4) for at in range(3)]
    offsets, decay = offsets_of([70]), torch.tensor([0.1, 0.5])
    for parts in ((q, k, v), pieces):
        with registry.backend("cpu"):
            found = retention(*parts, offsets, decay)
            whole = retention(*(x.contiguous() for x in parts), offsets, decay)
        assert found.equal(whole)


def test_retention_is_its_formula() -> None:
    q, k, v = (normal(3, 1, 2, seed=seed) for seed in range(3))
    decay = torch.tensor([0.5], dtype=torch.float64)
    with registry.backend("reference"):
        out = retention(q, k, v, torch.tensor([0, 1, 3]), decay)
    second = sum(float(q[2, 0] @ k[j, 0]) * math.exp(-0.5 * (2 - j + 1)) * v[j, 0] for j in (1, 2))
    assert torch.allclose(out[2, 0], second)
    assert torch.allclose(out[0, 0], float(q[0, 0] @ k[0, 0]) * math.exp(-0.5) * v[0, 0])


def test_periodic_attention_is_its_formula() -> None:
    angles = torch.tensor([[0.3, 1.0], [2.0, 0.7]], dtype=torch.float64)  # of queries, of keys
    query, key = (torch.stack([a.sin(), a.cos()], dim=1)[:, None] for a in angles)
    v = normal(2, 2, 3, seed=1)
    with registry.backend("reference"):
        gaps, decay = torch.tensor([[2.0], [3.0]]).double(), torch.tensor([-0.1]).double()
        out = periodic_attention(v, query, key, gaps, decay, torch.tensor([0, 2]))
    for head, turn in ((0, math.sin), (1, math.cos)):
        expected = turn(1.0 - 2.0) * math.exp(-0.5) * v[0, head] + turn(1.0 - 0.7) * math.exp(-0.3) * v[1, head]
        assert torch.allclose(out[1, head], expected)


def test_gradients_in_double_precision() -> None:
    inputs, _ = retained([5, 2], 2, 3, 2)
    attend, others, _ = by_phase([5, 2], 2, 2)
    offsets = offsets_of([5, 2])
    with registry.backend("reference"):
        leaves = [x.requires_grad_() for x in inputs]
        assert torch.autograd.gradcheck(lambda q, k, v, decay: retention(q, k, v, offsets, decay), leaves)
        assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in others])  # type: ignore[arg-type]


@needs_kernels
def test_the_operators_obey_the_rules_of_torch_library() -> None:
    inputs, _ = retained([5, 50], 2, 4, 8)
    q, k, v, decay = (x.float().requires_grad_() for x in inputs)
    torch.library.opcheck(torch.ops.turbogr.retention.default, (q, k, v, offsets_of([5, 50]), decay))
    _, (values, log_decay), _ = by_phase([5, 50], 2, 4)
    turns = [x.float() for x in times_of(55, 2)]
    arguments = (values.float().requires_grad_(), *turns, log_decay.float().requires_grad_(), offsets_of([5, 50]))
    torch.library.opcheck(torch.ops.turbogr.periodic_attention.default, arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decay": torch.zeros(3)}, "decay must have shape"),
        ({"k": torch.zeros(4, 2, 5)}, "k must have shape"),
        ({"offsets": torch.tensor([0, 3])}, "offsets must run from 0 to the 4"),
        ({"v": torch.zeros(4, 2, 4, dtype=torch.float64)}, "v must be torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], words: str) -> None:
    given = {name: torch.zeros(4, 2, 4) for name in "qkv"} | {"offsets": torch.tensor([0, 4]), "decay": torch.zeros(2)}
    with pytest.raises(ValueError, match=words):
        retention(**(given | change))
