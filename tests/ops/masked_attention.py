"""Attention with a mask, for tests: every operator as a function of its differentiable inputs, and random masks.

`dense_attention` is a second definition, with an n × n mask, written from README.md of the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.attention_inputs import AttentionInputs
from turbogr.ops import DecayBias, KeyRanges, RelativeBias, fuxi_attention, hstu_attention, softmax_attention
from turbogr.ops.jagged_attention.reference import bucket_boundaries

DECAY = torch.tensor([0.7, 0.6, 0.8], dtype=torch.float64)
ALPHA, SCALE = 0.7, 0.3


@dataclass(frozen=True)
class Operator:
    """An attention operator: the names of its differentiable inputs, and how it is called with their values."""

    names: tuple[str, ...]
    call: Callable[..., Tensor]
    channels: int = 1

    def leaves(self, inputs: AttentionInputs) -> list[Tensor]:
        return [DECAY if name == "decay" else getattr(inputs, name) for name in self.names]

    def bind(self, inputs: AttentionInputs, visible: KeyRanges | None) -> Callable[..., Tensor]:
        return lambda *leaves: self.call(inputs, visible, *leaves)

    def grad(self, inputs: AttentionInputs) -> Tensor:
        num_tokens, heads, e = inputs.v.shape
        random = torch.Generator().manual_seed(5)
        return torch.randn(num_tokens, heads, self.channels * e, dtype=torch.float64, generator=random)


def _hstu(
    inputs: AttentionInputs, visible: KeyRanges | None, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor
) -> Tensor:
    bias = RelativeBias(inputs.query_times, inputs.key_times, *weights) if weights else None
    alpha = 1.0 if weights else ALPHA
    return hstu_attention(q, k, v, inputs.offsets, bias, max_len=inputs.max_len, visible=visible, alpha=alpha)


def _fuxi(
    inputs: AttentionInputs, visible: KeyRanges | None, v: Tensor, position_weight: Tensor, times: Tensor, *qk: Tensor
) -> Tensor:
    kind = DecayBias if times.numel() == 3 else RelativeBias
    bias = kind(inputs.query_times, inputs.key_times, position_weight, times)
    q, k = qk or (None, None)
    return fuxi_attention(q, k, v, inputs.offsets, bias, max_len=inputs.max_len, visible=visible)


def _softmax(inputs: AttentionInputs, visible: KeyRanges | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax_attention(q, k, v, inputs.offsets, scale=SCALE, visible=visible)


OPERATORS = {
    "hstu": Operator(("q", "k", "v", "position_weight", "time_weight"), _hstu),
    "hstu without bias": Operator(("q", "k", "v"), _hstu),
    "fuxi": Operator(("v", "position_weight", "time_weight", "q", "k"), _fuxi, 3),
    "fuxi by decay": Operator(("v", "position_weight", "decay", "q", "k"), _fuxi, 3),
    "fuxi without content": Operator(("v", "position_weight", "decay"), _fuxi, 2),
    "softmax": Operator(("q", "k", "v"), _softmax),
}


def _any(i: int, n: int, random: torch.Generator) -> tuple[int, int]:
    first, last = torch.randint(0, n + 1, (2,), generator=random).tolist()
    return first, last


# Range of token i of a sequence of n.
MASKS: dict[str, Callable[[int, int, torch.Generator], tuple[int, int]]] = {
    "random": _any,
    "window": lambda i, n, random: (max(0, i - 40), i + 1),
    "far back": lambda i, n, random: (max(0, i - 200), max(0, i - 130)),
    "candidates": lambda i, n, random: (0, min(i, 2 * n // 3)),
    "everything": lambda i, n, random: (0, n),
    "prefix that sees all": lambda i, n, random: (0, n if i < 5 else i + 1),
    "the future alone": lambda i, n, random: (i + 1, n),
    "itself alone": lambda i, n, random: (0, 0),
    "mixed rows": lambda i, n, random: _any(i, n, random) if i % 7 == 0 else (max(0, i - 100), min(n, i + 100)),
}


def make_mask(name: str, lengths: list[int]) -> KeyRanges:
    random = torch.Generator().manual_seed(2)
    ranges = [MASKS[name](i, n, random) for n in lengths for i in range(n)]
    first, last = torch.tensor(ranges, dtype=torch.int64).view(-1, 2).unbind(1)
    return KeyRanges(first, last)


def dense_mask(visible: KeyRanges, start: int, n: int) -> Tensor:
    """[n, n], entry by entry."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mask[i, visible.first[start + i] : visible.last[start + i]] = True
        mask[i, i] = True
    return mask


def dense_attention(operator: str, inputs: AttentionInputs, visible: KeyRanges, *leaves: Tensor) -> Tensor:
    """The output in float64, from all n × n weights and an n × n mask."""
    given = dict(zip(OPERATORS[operator].names, leaves, strict=True))
    decay = given.pop("decay", DECAY)
    inputs = inputs._replace(**given)
    outputs = []
    for start, stop in zip(inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist(), strict=True):
        mask = dense_mask(visible, start, stop - start)
        weights = _dense_weights(operator, inputs, decay, start, stop)
        if operator == "softmax":
            exponentials = mask * torch.exp(weights[0])
            weights = [exponentials / exponentials.sum(2, keepdim=True)]
        channels = [torch.einsum("hij,jhe->ihe", mask * weight, inputs.v[start:stop]) for weight in weights]
        outputs.append(torch.cat(channels, 2))
    return torch.cat(outputs)


def _dense_weights(operator: str, inputs: AttentionInputs, decay: Tensor, start: int, stop: int) -> list[Tensor]:
    """The weights [h, n, n] of every channel before the mask; for softmax their logarithms."""
    place = torch.arange(stop - start)
    seconds = (inputs.query_times[start:stop, None] - inputs.key_times[None, start:stop]).abs()
    content = torch.einsum("ihd,jhd->hij", inputs.q[start:stop], inputs.k[start:stop])
    by_position = inputs.position_weight[inputs.max_len - 1 + place[None] - place[:, None]]
    by_bucket = inputs.time_weight[(seconds[..., None] >= bucket_boundaries(32)).sum(2)]
    a, beta, gamma = decay.unbind()
    by_decay = a * gamma ** (((1 + seconds.double()) / 86_400) ** beta)
    heads = inputs.q.shape[1]

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x)) / inputs.max_len

    shared = {"fuxi": [by_position, by_bucket], "fuxi by decay": [by_position, by_decay]}
    shared["fuxi without content"] = shared["fuxi by decay"]
    if operator in shared:
        channels = [weight.expand(heads, -1, -1) for weight in shared[operator]]
        return channels if operator == "fuxi without content" else [*channels, silu(content)]
    if operator == "softmax":
        return [SCALE * content]
    return [silu(content + by_position + by_bucket if operator == "hstu" else ALPHA * content)]
