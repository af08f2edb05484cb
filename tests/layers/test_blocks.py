"""Every block against its definition in docs/models, written out here for one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.judging import needs_kernels, with_gradients
from turbogr.config import ModelConfig
from turbogr.layers.attention_masks import WindowConfig, WindowMask
from turbogr.layers.block import Block
from turbogr.layers.tokens import Tokens
from turbogr.plugins import built_in_names, find
from turbogr.random import derive_seed, random_words

# No two sizes are equal, so none can stand for another.
DIM, NUM_HEADS, QK_DIM, V_DIM, FFN_DIM, MAX_LEN = 8, 2, 3, 5, 12, 11
LENGTHS = [5, 1, 0, 9, 2]
MAX_DISTANCE = 4  # below the longest sequence, in which all distances from 3 on share a weight
NUM_TIME_BUCKETS = 40  # the last begins at two days, and the longest sequence lasts longer
SITE, SEED = 7, 2**40 + 5

BACKENDS = [
    pytest.param("reference", torch.float64, 1e-11, id="reference"),
    pytest.param("cpu", torch.float32, 1e-5, id="cpu", marks=needs_kernels),
]

Weights = dict[str, Tensor]


class Sequence(NamedTuple):
    """What a formula knows of a sequence of n besides the vectors; `drop(x, k)` applies the k-th dropout of a block."""

    times: Tensor
    next_times: Tensor
    drop: Callable[[Tensor, int], Tensor]
    window: int

    def visible(self) -> Tensor:
        """Which j a token i sees, [n, n]: itself and earlier ones, at most `window`."""
        return torch.ones(len(self.times), len(self.times), dtype=torch.bool).tril().triu(1 - self.window)

    def distances(self) -> Tensor:
        """|t_{i+1} - t_j| in seconds, [n, n] int64."""
        return (self.next_times[:, None] - self.times[None, :]).abs()


def layer_norm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def heads(x: Tensor) -> tuple[Tensor, ...]:
    """Each head's columns of x [n, h · size], h times [n, size]."""
    return x.chunk(NUM_HEADS, dim=1)


def by_position(weight: Tensor, n: int) -> Tensor:
    place = torch.arange(n)
    return weight[MAX_DISTANCE - 1 + (place[None, :] - place[:, None]).clamp(1 - MAX_DISTANCE, MAX_DISTANCE - 1)]


def by_bucket(weight: Tensor, sequence: Sequence) -> Tensor:
    buckets = (sequence.distances().clamp(min=1).double().log() / 0.301).floor().long()
    return weight[buckets.clamp(max=NUM_TIME_BUCKETS)]


def by_decay(free: Tensor, sequence: Sequence) -> Tensor:
    amplitude, exponent, base = free[0], torch.log(1 + torch.exp(free[1])), 1 / (1 + torch.exp(-free[2]))
    days = (1 + sequence.distances()).double() / 86_400
    return amplitude * base ** (days**exponent)


def hstu(x: Tensor, w: Weights, sequence: Sequence) -> Tensor:
    v_width, qk_width = NUM_HEADS * V_DIM, NUM_HEADS * QK_DIM
    u, v, q, k = silu(layer_norm(x, 1e-6) @ w["uvqk"]).split([v_width, v_width, qk_width, qk_width], dim=1)
    bias = by_position(w["position_weight"], len(x)) + by_bucket(w["time_weight"], sequence)
    attended = [
        (silu(q_h @ k_h.T + bias) / MAX_LEN * sequence.visible()) @ v_h
        for q_h, k_h, v_h in zip(heads(q), heads(k), heads(v), strict=True)
    ]
    gated = sequence.drop(u * layer_norm(torch.cat(attended, dim=1), 1e-6), 0)
    return x + gated @ w["out_weight"] + w["out_bias"]


def sasrec(x: Tensor, w: Weights, sequence: Sequence) -> Tensor:
    n = layer_norm(x, 1e-8)
    q = n @ w["query_weight"] + w["query_bias"]
    k, v = (x @ w["key_value_weight"] + w["key_value_bias"]).split([NUM_HEADS * QK_DIM, NUM_HEADS * V_DIM], dim=1)
    attended = []
    for q_h, k_h, v_h in zip(heads(q), heads(k), heads(v), strict=True):
        weights = torch.exp(q_h @ k_h.T / QK_DIM**0.5) * sequence.visible()
        attended.append(weights / weights.sum(1, keepdim=True) @ v_h)
    z = layer_norm(n + sequence.drop(torch.cat(attended, dim=1) @ w["out_weight"] + w["out_bias"], 0), 1e-8)
    hidden = sequence.drop((z @ w["ffn_up"] + w["ffn_up_bias"]).clamp(min=0), 1)
    return z + sequence.drop(hidden @ w["ffn_down"] + w["ffn_down_bias"], 2)


def fuxi(x: Tensor, w: Weights, sequence: Sequence, *, content: bool, decay: bool) -> Tensor:
    v_width, qk_width = NUM_HEADS * V_DIM, NUM_HEADS * QK_DIM if content else 0
    u, v, q, k = silu(rms_norm(x) @ w["uvqk"]).split([(2 + content) * v_width, v_width, qk_width, qk_width], dim=1)
    position = by_position(w["position_weight"], len(x)) * sequence.visible()
    time = (by_decay if decay else by_bucket)(w["time_weight"], sequence) * sequence.visible()
    channels = []
    for q_h, k_h, v_h in zip(heads(q), heads(k), heads(v), strict=True):
        channels += [position @ v_h, time @ v_h]
        if content:
            channels.append((silu(q_h @ k_h.T) / MAX_LEN * sequence.visible()) @ v_h)
    gated = sequence.drop(u * rms_norm(torch.cat(channels, dim=1)), 0)
    o = x + gated @ w["out_weight"] + w["out_bias"]
    inner = sequence.drop(rms_norm(o), 1)
    return o + (silu(inner @ w["ffn_gate"]) * (inner @ w["ffn_up"])) @ w["ffn_down"]


def stu(x: Tensor, w: Weights, sequence: Sequence) -> Tensor:
    v_width, qk_width = NUM_HEADS * V_DIM, NUM_HEADS * QK_DIM
    normal = layer_norm(x, 1e-6) * w["input_norm_weight"] + w["input_norm_bias"]
    u, v, q, k = (normal @ w["uvqk"] + w["uvqk_bias"]).split([v_width, v_width, qk_width, qk_width], dim=1)
    u = silu(u)
    attended = torch.cat(
        [
            (silu(q_h @ k_h.T / QK_DIM**0.5) / MAX_LEN * sequence.visible()) @ v_h
            for q_h, k_h, v_h in zip(heads(q), heads(k), heads(v), strict=True)
        ],
        dim=1,
    )
    gated = u * (layer_norm(attended, 1e-6) * w["output_norm_weight"] + w["output_norm_bias"])
    return x + sequence.drop(torch.cat([u, attended, gated], dim=1), 0) @ w["out_weight"]


FORMULAS: dict[str, Callable[[Tensor, Weights, Sequence], Tensor]] = {
    "hstu": hstu,
    "sasrec": sasrec,
    "fuxi-alpha": partial(fuxi, content=True, decay=False),
    "fuxi-beta": partial(fuxi, content=False, decay=True),
    "fuxi-gamma": partial(fuxi, content=True, decay=True),
    "stu": stu,
}


def make_block(name: str, rate: float) -> Block:
    config = ModelConfig(
        name=name,  # type: ignore[arg-type]
        dim=DIM,
        num_heads=NUM_HEADS,
        qk_dim=QK_DIM,
        v_dim=V_DIM,
        max_len=MAX_LEN,
        max_distance=MAX_DISTANCE,
        num_time_buckets=NUM_TIME_BUCKETS,
        ffn_multiplier=FFN_DIM / DIM,
        dropout=rate,
    )
    return find("block", name).factory(config, SITE)


def make_tokens(seed: int | None) -> Tokens:
    """Tokens from less than a second to days apart, some at the same time, with keys of any size."""
    random = torch.Generator().manual_seed(1)
    clocks = [(10 ** (6 * torch.rand(n + 1, generator=random))).long() - 1 for n in LENGTHS]
    for clock in clocks:
        clock[2::3] = 0
    clocks = [clock.cumsum(0) for clock in clocks]
    return Tokens(
        offsets=torch.tensor([0, *LENGTHS]).cumsum(0),
        times=torch.cat([clock[:-1] for clock in clocks]),
        next_times=torch.cat([clock[1:] for clock in clocks]),
        keys=torch.randint(-(2**62), 2**62, (sum(LENGTHS),), generator=random),
        seed=seed,
    )


def formula(name: str, names: list[str], tokens: Tokens, rate: float, window: int) -> Callable[..., Tensor]:
    """The definition of a block as a function of x [T, D] and the parameters in the order of `names`."""

    def drop(x: Tensor, number: int, keys: Tensor) -> Tensor:
        if tokens.seed is None:
            return x
        words = random_words(keys, derive_seed(tokens.seed, SITE + number), x.shape[1])
        return torch.where(words < rate * 2**32, 0.0, x / (1 - rate))

    def function(x: Tensor, *values: Tensor) -> Tensor:
        weights = dict(zip(names, values, strict=True))
        columns = (x, tokens.times, tokens.next_times, tokens.keys)
        rows = [
            FORMULAS[name](vectors, weights, Sequence(times, next_times, partial(drop, keys=keys), window))
            for vectors, times, next_times, keys in zip(*(column.split(LENGTHS) for column in columns), strict=True)
        ]
        return torch.cat(rows)

    return function


def assert_is_the_formula(
    name: str,
    rate: float,
    seed: int | None,
    backend: str,
    dtype: torch.dtype,
    tolerance: float,
    window: int | None = None,
) -> None:
    """Compare outputs and the gradients of the input and every parameter."""
    block, tokens = make_block(name, rate), make_tokens(seed)
    if window is not None:
        tokens = tokens._replace(visible=WindowMask(WindowConfig(window)).ranges(tokens))
    random = torch.Generator().manual_seed(2)

    def normal(shape: torch.Size) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=random)

    x = normal(torch.Size([sum(LENGTHS), DIM]))
    names = [parameter_name for parameter_name, _ in block.named_parameters()]
    inputs = [x, *(0.5 * normal(parameter.shape) for parameter in block.parameters())]
    grad = normal(x.shape)

    def compute(x: Tensor, *values: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(block, dict(zip(names, values, strict=True)), (x, tokens))
        return out

    ours = with_gradients(compute, inputs, grad, backend, dtype)
    exact = with_gradients(
        formula(name, names, tokens, rate, window or MAX_LEN), inputs, grad, "reference", torch.float64
    )
    for tensor_name, o, e in zip(("out", "x", *names), ours, exact, strict=True):
        assert o.shape == e.shape, tensor_name
        assert float((o - e).abs().max()) <= tolerance * float(e.abs().max()), tensor_name


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), BACKENDS)
@pytest.mark.parametrize("name", built_in_names("block"))
def test_a_block_is_its_formula(name: str, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    assert_is_the_formula(name, 0.5, None, backend, dtype, tolerance)


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), BACKENDS)
@pytest.mark.parametrize("rate", [0.2, 0.5])
@pytest.mark.parametrize("name", built_in_names("block"))
def test_a_block_drops_where_its_formula_says(
    name: str, rate: float, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    assert_is_the_formula(name, rate, SEED, backend, dtype, tolerance)


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), BACKENDS)
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("name", built_in_names("block"))
def test_a_block_sees_what_the_mask_says(
    name: str, window: int, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    assert_is_the_formula(name, 0.5, None, backend, dtype, tolerance, window)
