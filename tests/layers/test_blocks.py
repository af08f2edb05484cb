"""Every block against its definition in docs/models, written out here for one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.judging import needs_kernels, with_gradients
from turbogr.config import ModelConfig
from turbogr.errors import UserError
from turbogr.layers.attention_masks import WindowConfig, WindowMask
from turbogr.layers.block import Block
from turbogr.layers.fuxi_linear import FuXiLinearConfig
from turbogr.layers.sasrec import SASRecConfig
from turbogr.layers.tokens import Tokens
from turbogr.models import RetrievalModel
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


def by_bucket(w: Weights, sequence: Sequence) -> Tensor:
    return by_bucket_of(w["time_weight"], sequence)


def by_bucket_of(weight: Tensor, sequence: Sequence) -> Tensor:
    buckets = (sequence.distances().clamp(min=1).double().log() / 0.301).floor().long()
    return weight[buckets.clamp(max=NUM_TIME_BUCKETS)]


def by_decay(w: Weights, sequence: Sequence) -> Tensor:
    free = w["time_weight"]
    amplitude, exponent, base = free[0], torch.log(1 + torch.exp(free[1])), 1 / (1 + torch.exp(-free[2]))
    days = (1 + sequence.distances()).double() / 86_400
    return amplitude * base ** (days**exponent)


def by_inverse_power(w: Weights, sequence: Sequence) -> Tensor:
    seconds = 1 + (sequence.next_times[:, None] - sequence.times[None, :]).clamp(min=0)
    return w["time_amplitude"] * seconds.double() ** -w["time_exponent"]


def by_decay_in_seconds(w: Weights, sequence: Sequence) -> Tensor:
    seconds = sequence.distances().double()
    exponent, base = held(w["time_exponent"], 0.01, math.inf), held(w["time_base"], 1e-4, 1.0)
    power = torch.where(seconds > 0, seconds.clamp(min=1) ** exponent, 0.0)
    return w["time_amplitude"] * base**power


def held(x: Tensor, low: float, high: float) -> Tensor:
    """Clamped, but with the gradient of x."""
    return x + (x.clamp(low, high) - x).detach()


def hstu(x: Tensor, w: Weights, sequence: Sequence) -> Tensor:
    v_width, qk_width = NUM_HEADS * V_DIM, NUM_HEADS * QK_DIM
    u, v, q, k = silu(layer_norm(x, 1e-6) @ w["uvqk"]).split([v_width, v_width, qk_width, qk_width], dim=1)
    bias = by_position(w["position_weight"], len(x)) + by_bucket(w, sequence)
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


def fuxi(
    x: Tensor, w: Weights, sequence: Sequence, *, content: bool, time_weights: Callable[[Weights, Sequence], Tensor]
) -> Tensor:
    v_width, qk_width = NUM_HEADS * V_DIM, NUM_HEADS * QK_DIM if content else 0
    u, v, q, k = silu(rms_norm(x) @ w["uvqk"]).split([(2 + content) * v_width, v_width, qk_width, qk_width], dim=1)
    position = by_position(w["position_weight"], len(x)) * sequence.visible()
    time = time_weights(w, sequence) * sequence.visible()
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


def fuxi_linear(x: Tensor, w: Weights, sequence: Sequence) -> Tensor:
    """Five periods, of 2^(10 + 3 g) seconds: twice as many divide the heads' ten columns."""
    n, v_width, qk_width = len(x), NUM_HEADS * V_DIM, NUM_HEADS * QK_DIM
    normal = layer_norm(x, 1e-6)
    u, q, k, v = silu(normal @ w["uqkv"]).split([3 * v_width, qk_width, qk_width, v_width], dim=1)
    place = torch.arange(n)
    steps = (place[:, None] - place[None, :] + 1).double()
    rates = torch.exp(-torch.log(1 + torch.exp(w["retention_decay"])).cumsum(0))
    retained = [
        (q_h @ k_h.T * torch.exp(-rate * steps)).tril() @ v_h
        for q_h, k_h, v_h, rate in zip(heads(q), heads(k), heads(v), rates, strict=True)
    ]

    values = (normal @ w["time_value"]).chunk(10, dim=1)
    passed = (sequence.next_times - sequence.times).clamp(min=0).double()
    between = torch.tensor([[passed[j : i + 1].sum() for j in range(n)] for i in range(n)]).view(n, n)
    by_time = []
    for head, value in enumerate(values):
        period = 2 ** (10 + 3 * (head % 5))
        speed = 2 * math.pi / period
        angle = speed * (sequence.next_times % period).double()[:, None] - speed * (sequence.times % period).double()
        forgotten = (1 / (1 + torch.exp(-w["time_decay"][head % 5]))) ** (speed * between)
        gathered = ((angle.sin() if head < 5 else angle.cos()) * forgotten).tril() @ value
        by_time.append(w["time_share"][head] * gathered + w["time_own_share"][head] * value)

    vectors, value = w["position_vectors"][:n], normal @ w["position_value"]
    by_place = w["position_share"] * ((vectors @ vectors.T) / 16).tril() @ value + w["position_own_share"] * value
    channels = [layer_norm(channel, 1e-6) for channel in (torch.cat(retained, 1), torch.cat(by_time, 1), by_place)]
    o = x + sequence.drop(u * torch.cat(channels, dim=1), 0) @ w["out_weight"]
    inner = sequence.drop(rms_norm(o), 1)
    return o + (silu(inner @ w["ffn_gate"]) * (inner @ w["ffn_up"])) @ w["ffn_down"]


FORMULAS: dict[str, Callable[[Tensor, Weights, Sequence], Tensor]] = {
    "hstu": hstu,
    "sasrec": sasrec,
    "fuxi": partial(fuxi, content=True, time_weights=by_decay),
    "fuxi-alpha": partial(fuxi, content=True, time_weights=by_bucket),
    "fuxi-beta": partial(fuxi, content=False, time_weights=by_inverse_power),
    "fuxi-beta-days": partial(fuxi, content=False, time_weights=by_decay),
    "fuxi-gamma": partial(fuxi, content=False, time_weights=by_decay_in_seconds),
    "fuxi-linear": fuxi_linear,
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
    block: Block = find("block", name).factory(config, SITE)
    block.join(block)
    return block


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
        # The gradient of a single number is one sum whose terms cancel; there are no larger ones beside it.
        allowed = tolerance * (10 if e.numel() == 1 else 1)
        assert float((o - e).abs().max()) <= allowed * float(e.abs().max()), tensor_name


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
@pytest.mark.parametrize("name", [name for name in built_in_names("block") if name != "fuxi-linear"])
def test_a_block_sees_what_the_mask_says(
    name: str, window: int, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    assert_is_the_formula(name, 0.5, None, backend, dtype, tolerance, window)


def test_fuxi_linear_refuses_masks() -> None:
    block, tokens = make_block("fuxi-linear", 0.0), make_tokens(None)
    tokens = tokens._replace(visible=WindowMask(WindowConfig(2)).ranges(tokens))
    with pytest.raises(UserError, match="fuxi-linear sees all earlier tokens and has no other masks"):
        block(torch.zeros(sum(LENGTHS), DIM), tokens)
    config = ModelConfig(name="fuxi-linear", mask="window", dim=8, num_heads=2, max_len=5)
    with pytest.raises(UserError, match=r"set model.mask=causal or choose another model.name"):
        RetrievalModel(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"periods": 3}, "10, into 2 · 3 heads, one pair for each period, which does not go evenly"),
        ({"periods": 0}, "fuxi-linear.periods must be positive, got 0"),
        ({"period_base": 16, "period_stride": 3}, r"16\^31 seconds, at most 2\^62 are possible"),
        ({"position_dim": 5}, "position_dim must be even, got 5"),
    ],
)
def test_options_of_fuxi_linear_that_cannot_be_are_refused(options: dict[str, int], words: str) -> None:
    found = FuXiLinearConfig(**options)

    def use() -> None:
        found.check()
        found.periods_of(10)

    with pytest.raises(UserError, match=words):
        use()


def test_blocks_of_fuxi_linear_share_the_first_one_s_decay_of_time() -> None:
    config = ModelConfig(name="fuxi-linear", dim=8, num_heads=2, num_blocks=3, max_len=11)
    model = RetrievalModel(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if name.endswith("time_decay")] == ["blocks.0.time_decay"]
    assert len(names) == len(set(names)) and not any("_first" in name for name in model.state_dict())
    last, tokens = model.blocks[2], make_tokens(None)
    x = torch.randn(sum(LENGTHS), 8, generator=torch.Generator().manual_seed(1))
    before = last(x, tokens)
    (before.square().sum()).backward()
    assert model.blocks[0].time_decay.grad.abs().sum() > 0  # type: ignore[union-attr]
    with torch.no_grad():
        model.blocks[0].time_decay.add_(1.0)  # type: ignore[operator]
    assert not last(x, tokens).equal(before)


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), BACKENDS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_sasrec_as_a_transformer_is_its_formula(
    norm: str, backend: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transformer(x: Tensor, w: Weights, sequence: Sequence) -> Tensor:
        seen = layer_norm(x, 1e-8) if norm == "pre" else x
        q = seen @ w["query_weight"] + w["query_bias"]
        k, v = (seen @ w["key_value_weight"] + w["key_value_bias"]).split([NUM_HEADS * QK_DIM, NUM_HEADS * V_DIM], 1)
        attended = []
        for q_h, k_h, v_h in zip(heads(q), heads(k), heads(v), strict=True):
            weights = torch.exp(q_h @ k_h.T / QK_DIM**0.5) * sequence.visible()
            attended.append(weights / weights.sum(1, keepdim=True) @ v_h)
        z = x + sequence.drop(torch.cat(attended, dim=1) @ w["out_weight"] + w["out_bias"], 0)
        z = z if norm == "pre" else layer_norm(z, 1e-8)
        inner = (layer_norm(z, 1e-8) if norm == "pre" else z) @ w["ffn_up"] + w["ffn_up_bias"]
        hidden = sequence.drop(inner * (1 + torch.erf(inner / 2**0.5)) / 2, 1)
        out = z + sequence.drop(hidden @ w["ffn_down"] + w["ffn_down_bias"], 2)
        return out if norm == "pre" else layer_norm(out, 1e-8)

    monkeypatch.setitem(FORMULAS, "sasrec", transformer)
    component = find("block", "sasrec").factory
    made = component.__init__
    options = SASRecConfig(norm=norm, activation="gelu")  # type: ignore[arg-type]
    monkeypatch.setattr(component, "__init__", lambda self, config, site, given=None: made(self, config, site, options))
    assert_is_the_formula("sasrec", 0.5, SEED, backend, dtype, tolerance)
