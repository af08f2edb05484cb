"""What operators refuse: values that a compiled graph brings, types that do not match, sizes of nothing, odd words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention_inputs import make_inputs
from tests.ops.judging import needs_kernels
from turbogr.ops import (
    RelativeBias,
    embed,
    full_softmax,
    gated_linear,
    gated_mlp,
    hstu_attention,
    norm_linear,
    row_adagrad_,
    row_adam_,
    sampled_logits,
    sampled_softmax,
    softmax_attention,
    unique_rows,
)
from turbogr.ops.jagged_attention.fuxi import DecayBias, fuxi_attention
from turbogr.ops.keyed_dropout import keyed_dropout
from turbogr.random import Dropout


class Subclass(Tensor):
    """A tensor as other libraries make them."""


def bias(num_tokens: int, max_len: int) -> RelativeBias:
    times = torch.zeros(num_tokens, dtype=torch.int64)
    return RelativeBias(times, times, torch.zeros(2 * max_len - 1), torch.zeros(3))


def heads(num_tokens: int = 5, num_heads: int = 1, size: int = 4) -> Tensor:
    return torch.randn(num_tokens, num_heads, size)


X, ROWS = heads(), torch.randn(5, 4)
BY_OFFSETS = {
    "hstu": lambda offsets: hstu_attention(X, X, X, offsets, bias(5, 8), max_len=8),
    "fuxi": lambda offsets: fuxi_attention(X, X, X, offsets, bias(5, 8), max_len=8),
    "softmax": lambda offsets: softmax_attention(X, X, X, offsets, scale=1.0),
}
BY_INDEX = {
    "embed": lambda index: embed(ROWS, index, ROWS, torch.zeros_like(index), scale=1.0),
    "positions": lambda index: embed(ROWS, torch.zeros_like(index), ROWS, index, scale=1.0),
    "targets": lambda index: full_softmax(ROWS[:2], ROWS, index, temperature=0.1),
    "index": lambda index: sampled_logits(ROWS[:2], ROWS, index[:, None], temperature=0.1),
    "positives": lambda index: sampled_softmax(ROWS[:2], ROWS, index, torch.zeros(2, 3).int(), temperature=0.1),
    "negatives": lambda index: sampled_softmax(ROWS[:2], ROWS, index * 0, index[:, None], temperature=0.1),
}


@needs_kernels
@pytest.mark.parametrize("operator", BY_OFFSETS.values(), ids=BY_OFFSETS.keys())
def test_a_compiled_graph_checks_the_offsets_it_is_given(operator: Any) -> None:
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    good = torch.tensor([0, 2, 5])
    torch.testing.assert_close(compiled(good), operator(good))
    for wrong in ([0, 2, 5000], [0, 7, 5], [1, 2, 5]):
        with pytest.raises(ValueError, match="offsets must"):
            compiled(torch.tensor(wrong))


@needs_kernels
@pytest.mark.parametrize("operator", BY_INDEX.values(), ids=BY_INDEX.keys())
def test_a_compiled_graph_checks_the_indices_it_is_given(operator: Any) -> None:
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    good = torch.tensor([0, 4])
    torch.testing.assert_close(compiled(good), operator(good))
    for wrong in ([0, 900], [-1, 0]):
        with pytest.raises(ValueError, match="outside 0 to 4"):
            compiled(torch.tensor(wrong))


@pytest.mark.parametrize("operator", BY_OFFSETS.values(), ids=BY_OFFSETS.keys())
def test_a_subclass_of_tensor_is_checked_too(operator: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to the 5 values, got 0 to 5000"):
        operator(torch.tensor([0, 2, 5000]).as_subclass(Subclass))


def test_offsets_that_decrease_are_named_with_their_position() -> None:
    with pytest.raises(ValueError, match="got 4 then 2 at position 1"):
        BY_OFFSETS["hstu"](torch.tensor([0, 4, 2, 5]))


DOUBLE = ROWS.double()
INDEX = torch.tensor([0, 1])
KEYS = torch.arange(5)
WRONG_TYPES: dict[str, Any] = {
    "k": lambda: hstu_attention(X, X.double(), X, torch.tensor([0, 5]), bias(5, 8), max_len=8),
    "position_weight": lambda: hstu_attention(
        X, X, X, torch.tensor([0, 5]), bias(5, 8)._replace(position_weight=torch.zeros(15).half()), max_len=8
    ),
    "position_rows": lambda: embed(ROWS, INDEX, DOUBLE, INDEX, scale=1.0),
    "gate": lambda: gated_linear(ROWS, DOUBLE, ROWS, torch.eye(4), norm="none"),
    "residual": lambda: gated_linear(ROWS, ROWS, DOUBLE, torch.eye(4), norm="none"),
    "up_weight": lambda: gated_mlp(ROWS, torch.eye(4), torch.eye(4).double(), torch.eye(4), norm="none"),
    "weight": lambda: norm_linear(ROWS, torch.eye(4).double(), norm="none", activation="none"),
    "bias": lambda: norm_linear(ROWS, torch.eye(4), DOUBLE[0], norm="none", activation="none"),
    "rows": lambda: sampled_softmax(ROWS, DOUBLE, KEYS, KEYS[:, None], temperature=1.0),
    "grad": lambda: row_adagrad_(ROWS.clone(), ROWS.clone(), INDEX, DOUBLE[:2], lr=0.1, eps=1e-8),
    "square": lambda: row_adagrad_(ROWS.clone(), ROWS.bfloat16(), INDEX, ROWS[:2], lr=0.1, eps=1e-8),
    "mean": lambda: row_adam_(
        ROWS.clone(), ROWS.half(), ROWS.clone(), INDEX, ROWS[:2], step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8
    ),
}


@pytest.mark.parametrize(("name", "call"), WRONG_TYPES.items(), ids=WRONG_TYPES.keys())
def test_tensors_of_two_types_are_not_mixed(name: str, call: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be torch.float32 like the other tensors"):
        call()


@pytest.mark.parametrize("shape", [(5, 0, 4), (5, 1, 0)], ids=str)
def test_empty_heads_are_refused(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for operator in (
        lambda: hstu_attention(x, x, x, torch.tensor([0, 5]), bias(5, 8), max_len=8),
        lambda: fuxi_attention(None, None, x, torch.tensor([0, 5]), bias(5, 8), max_len=8),
        lambda: softmax_attention(x, x, x, torch.tensor([0, 5]), scale=1.0),
    ):
        with pytest.raises(ValueError, match="must not be empty along dimension"):
            operator()


def test_vectors_of_width_0_are_refused() -> None:
    nothing = torch.zeros(2, 0)
    with pytest.raises(ValueError, match="queries must not be empty along dimension 1"):
        sampled_softmax(nothing, nothing, INDEX, INDEX[:, None], temperature=1.0)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="norm must be one of layer, rms, none, got 'laier'"):
        norm_linear(ROWS, torch.eye(4), norm="laier", activation="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation must be one of silu, none, got 'gelu'"):
        norm_linear(ROWS, torch.eye(4), norm="none", activation="gelu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm must be one of"):
        gated_linear(ROWS, ROWS, ROWS, torch.eye(4), norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one tensor of ids"):
        unique_rows([], 5)


@pytest.mark.parametrize("keys", [KEYS.float(), KEYS.int()], ids=lambda keys: str(keys.dtype))
def test_keys_of_another_type_are_not_truncated(keys: Tensor) -> None:
    with pytest.raises(ValueError, match="keys must be int64"):
        keyed_dropout(ROWS, Dropout(0.5, 1), keys)
    with pytest.raises(ValueError, match="keys must be int64"):
        gated_linear(ROWS, ROWS, ROWS, torch.eye(4), norm="none", dropout=Dropout(0.5, 1), keys=keys)


@needs_kernels
@pytest.mark.parametrize("decay", [(0.7, 0.6, float("nan")), (0.7, float("nan"), 0.8), (0.7, 0.6, -1.0)], ids=str)
def test_a_decay_without_a_value_gives_nan(decay: tuple[float, float, float]) -> None:
    inputs = make_inputs([20], 1, 4, 4)
    weights = DecayBias(inputs.query_times, inputs.key_times, inputs.position_weight.float(), torch.tensor(decay))
    v = inputs.v.float()
    out = fuxi_attention(None, None, v, inputs.offsets, weights, max_len=inputs.max_len)
    assert out[:, :, 4:].isnan().all()


@needs_kernels
@pytest.mark.parametrize("max_len", [255, 256, 257])
def test_where_the_size_of_blocks_changes_the_result_does_not(max_len: int) -> None:
    inputs = make_inputs([200, 30], 2, 12, 8, max_len=max_len)
    leaves = [x.float() for x in (inputs.q, inputs.k, inputs.v, inputs.position_weight, inputs.time_weight)]
    exact = [x.double() for x in leaves]

    def attend(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        times = inputs.query_times, inputs.key_times
        return hstu_attention(q, k, v, inputs.offsets, RelativeBias(*times, *weights), max_len=max_len)

    torch.testing.assert_close(attend(*leaves).double(), attend(*exact), rtol=1e-5, atol=1e-6)
