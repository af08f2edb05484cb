"""fuxi_attention and softmax_attention against their formulas, written out token by token."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from turbogr.ops import DecayBias, RelativeBias, fuxi_attention, registry, softmax_attention

MAX_LEN = 6
OFFSETS = torch.tensor([0, 3, 3, 4, 9])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _reference():
    with registry.backend("reference"):
        yield


@pytest.fixture
def qkv() -> list[Tensor]:
    return [draw(9, 2, size, seed=seed).requires_grad_() for seed, size in enumerate((3, 3, 4))]


@pytest.fixture
def times() -> tuple[Tensor, Tensor]:
    own = torch.tensor([5, 5, 400_000, 7, 0, 1, 90_000, 90_000, 50_000_000])
    following = torch.tensor([5, 400_000, 400_000, 7, 1, 90_000, 90_000, 50_000_000, 50_000_001])
    return following, own


def make_bias(kind: str, times: tuple[Tensor, Tensor]) -> RelativeBias | DecayBias:
    position = draw(2 * MAX_LEN - 1, seed=4).requires_grad_()
    if kind == "buckets":
        return RelativeBias(*times, position, draw(33, seed=5).requires_grad_())
    decay = torch.tensor([0.7, 0.4, 0.8], dtype=torch.float64, requires_grad=True)
    return DecayBias(*times, position, decay)


def time_weight(bias: RelativeBias | DecayBias, i: int, j: int) -> float:
    seconds = abs(int(bias.query_times[i]) - int(bias.key_times[j]))
    if isinstance(bias, RelativeBias):
        bucket = min(int(math.log(max(1, seconds)) / 0.301), bias.time_weight.numel() - 1)
        return bias.time_weight[bucket].item()
    a, beta, gamma = bias.decay.tolist()
    return a * gamma ** (((1 + seconds) / 86_400) ** beta)


def pairs() -> list[tuple[int, int, int]]:
    """(token, earlier or same token of its sequence, distance)."""
    bounds = OFFSETS.tolist()
    return [(i, j, i - j) for start, stop in pairwise(bounds) for i in range(start, stop) for j in range(start, i + 1)]


@pytest.mark.parametrize("kind", ["buckets", "decay"])
@pytest.mark.parametrize("content", [True, False])
def test_fuxi_is_its_formula(qkv: list[Tensor], times: tuple[Tensor, Tensor], kind: str, content: bool) -> None:
    q, k, v = qkv
    bias = make_bias(kind, times)
    expected = torch.zeros(9, 2, 12 if content else 8, dtype=torch.float64)
    for i, j, distance in pairs():
        for head in range(2):
            value = v[j, head].detach()
            expected[i, head, :4] += bias.position_weight[MAX_LEN - 1 - distance].item() * value
            expected[i, head, 4:8] += time_weight(bias, i, j) * value
            if content:
                score = torch.dot(q[i, head], k[j, head]).detach()
                expected[i, head, 8:] += torch.nn.functional.silu(score) / MAX_LEN * value
    out = fuxi_attention(q if content else None, k if content else None, v, OFFSETS, bias, max_len=MAX_LEN)
    torch.testing.assert_close(out.detach(), expected)


def test_softmax_is_its_formula(qkv: list[Tensor]) -> None:
    q, k, v = (x.detach() for x in qkv)
    expected = torch.zeros(9, 2, 4, dtype=torch.float64)
    for i in range(9):
        earlier = [j for token, j, _ in pairs() if token == i]
        for head in range(2):
            weights = torch.tensor([math.exp(0.6 * float(q[i, head] @ k[j, head])) for j in earlier])
            weights = (weights / weights.sum()).double()
            expected[i, head] = sum(w * v[j, head] for w, j in zip(weights, earlier, strict=True))
    torch.testing.assert_close(softmax_attention(q, k, v, OFFSETS, scale=0.6), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["buckets", "decay"])
@pytest.mark.parametrize("content", [True, False])
def test_fuxi_gradients(qkv: list[Tensor], times: tuple[Tensor, Tensor], kind: str, content: bool) -> None:
    bias = make_bias(kind, times)

    def attend(v: Tensor, position: Tensor, time: Tensor, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
        return fuxi_attention(q, k, v, OFFSETS, type(bias)(*times, position, time), max_len=MAX_LEN)

    q, k, v = qkv
    assert torch.autograd.gradcheck(attend, (v, bias[2], bias[3], *((q, k) if content else ())))


def test_softmax_gradients(qkv: list[Tensor]) -> None:
    assert torch.autograd.gradcheck(lambda q, k, v: softmax_attention(q, k, v, OFFSETS, scale=0.6), tuple(qkv))


@pytest.mark.parametrize("seconds", [0, 1, 86_400, 2**31, 10**12])
@pytest.mark.parametrize("gamma", [1e-6, 0.8, 1 - 1e-6])
def test_the_decay_and_its_gradient_are_finite_at_any_distance(seconds: int, gamma: float) -> None:
    decay = torch.tensor([0.7, 0.4, gamma], requires_grad=True)
    times = torch.tensor([seconds]), torch.tensor([0])
    v = torch.ones(1, 1, 1)
    bias = DecayBias(*times, torch.zeros(2 * MAX_LEN - 1), decay)
    out = fuxi_attention(None, None, v, torch.tensor([0, 1]), bias, max_len=MAX_LEN)
    out.sum().backward()
    assert decay.grad is not None
    assert out.isfinite().all() and decay.grad.isfinite().all()


def test_gradients_do_not_depend_on_the_threads() -> None:
    n = 200
    times = torch.arange(n) * 977
    grads = []
    threads = torch.get_num_threads()
    try:
        for number in (1, max(2, threads)):
            torch.set_num_threads(number)
            position, table = torch.zeros(2 * n - 1, requires_grad=True), torch.zeros(33, requires_grad=True)
            v = draw(n, 2, 8, seed=9).float()
            out = fuxi_attention(
                None, None, v, torch.tensor([0, n]), RelativeBias(times, times, position, table), max_len=n
            )
            out.square().add(out).sum().backward()
            assert position.grad is not None and table.grad is not None
            grads.append((position.grad, table.grad))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, many) for one, many in zip(*grads, strict=True))


def test_nothing_in_gives_nothing_out(times: tuple[Tensor, Tensor]) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    bias = RelativeBias(none, none, torch.zeros(2 * MAX_LEN - 1), torch.zeros(3))
    q, v = torch.zeros(0, 2, 3), torch.zeros(0, 2, 4)
    for offsets in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        assert fuxi_attention(q, q, v, offsets, bias, max_len=MAX_LEN).shape == (0, 2, 12)
        assert fuxi_attention(None, None, v, offsets, bias, max_len=MAX_LEN).shape == (0, 2, 8)
        assert softmax_attention(q, q, v, offsets, scale=1.0).shape == (0, 2, 4)


def test_what_does_not_fit_is_refused(qkv: list[Tensor], times: tuple[Tensor, Tensor]) -> None:
    q, k, v = qkv
    bias = make_bias("buckets", times)
    with pytest.raises(ValueError, match="both q and k"):
        fuxi_attention(q, None, v, OFFSETS, bias, max_len=MAX_LEN)
    with pytest.raises(ValueError, match="longer than max_len"):
        fuxi_attention(q, k, v, OFFSETS, RelativeBias(*times, draw(7, seed=1), bias[3]), max_len=4)
    with pytest.raises(ValueError, match="longer than max_len"):
        softmax_attention(q, k, v, OFFSETS, scale=1.0, max_len=4)
    with pytest.raises(ValueError, match="decay must have shape"):
        fuxi_attention(q, k, v, OFFSETS, DecayBias(*times, bias[2], draw(4, seed=1)), max_len=MAX_LEN)
    with pytest.raises(ValueError, match="position_weight must have shape"):
        fuxi_attention(q, k, v, OFFSETS, RelativeBias(*times, draw(5, seed=1), bias[3]), max_len=MAX_LEN)
