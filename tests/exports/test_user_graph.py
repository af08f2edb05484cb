"""The padded graph of every block gives the vectors of the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from turbogr.config import ModelConfig
from turbogr.data.batching import batch_from_histories
from turbogr.errors import UserError
from turbogr.exports.user_graph import UserGraph, table_norms, trace_user_graph
from turbogr.layers.block import Block
from turbogr.models import RetrievalModel
from turbogr.models.table_encoder import TableEncoder
from turbogr.ops import RelativeBias, hstu_attention, registry
from turbogr.ops.jagged_attention import padded, reference
from turbogr.ops.registry import padded as padded_operators
from turbogr.plugins import built_in_names, register

NUM_ITEMS, MAX_LEN = 40, 12
BLOCKS = [name for name in built_in_names("block") if name != "fuxi-linear"]  # its operators have no padded form


def build(name: str, mask: str = "causal", **sizes: int) -> RetrievalModel:
    sizes = {"dim": 16, "max_len": MAX_LEN, "num_blocks": 2, "num_heads": 2, "qk_dim": 8, "v_dim": 8, **sizes}
    model = RetrievalModel(ModelConfig(name=name, mask=mask, num_time_buckets=128, ffn_multiplier=2.0, **sizes))
    model.reset_parameters(torch.Generator().manual_seed(3))
    return model.eval().requires_grad_(False)


def histories(seed: int, lengths: list[int]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    generator = np.random.default_rng(seed)
    items = [generator.integers(0, NUM_ITEMS, length).tolist() for length in lengths]
    times = [np.sort(generator.integers(0, 10 ** generator.integers(1, 10), n)).tolist() for n in lengths]
    return items, times, [row[-1] + int(generator.integers(0, 10**6)) for row in times]


def inputs(items: list[list[int]], times: list[list[int]], requests: list[int]) -> tuple[Tensor, ...]:
    longest = max(2, *map(len, items))
    padded_items, padded_times = (torch.zeros(len(items), longest, dtype=torch.int64) for _ in range(2))
    for row, (some, when) in enumerate(zip(items, times, strict=True)):
        padded_items[row, : len(some)], padded_times[row, : len(some)] = torch.tensor(some), torch.tensor(when)
        padded_items[row, len(some) :] = 7  # whatever stands in the padding
        padded_times[row, len(some) :] = 123456789
    return padded_items, padded_times, torch.tensor([len(row) for row in items]), torch.tensor(requests)


@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_graph_gives_the_vectors_of_the_model(name: str, mask: str) -> None:
    model = build(name, mask)
    table = torch.randn(NUM_ITEMS, 16, generator=torch.Generator().manual_seed(1)) * 0.1
    vectors, norms = table / table_norms(table)[:, None], table_norms(table)
    graph = UserGraph(model).eval()
    for seed, lengths in ((0, [1, 3, MAX_LEN, 7]), (1, [1]), (2, [2, 1, 5])):
        given = histories(seed, lengths)
        expected = TableEncoder(model, table).encode_last(batch_from_histories(*given))
        with padded_operators():
            found = graph(vectors, norms, *inputs(*given))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_the_traced_graph_takes_any_number_of_users_and_events() -> None:
    model = build("fuxi-alpha")
    program = trace_user_graph(model, NUM_ITEMS).module()
    table = torch.randn(NUM_ITEMS, 16, generator=torch.Generator().manual_seed(1))
    vectors, norms = table / table_norms(table)[:, None], table_norms(table)
    for seed, lengths in ((0, [1, 3, MAX_LEN, 7]), (1, [1]), (2, [2, 1, 5])):
        given = histories(seed, lengths)
        expected = TableEncoder(model, table).encode_last(batch_from_histories(*given))
        torch.testing.assert_close(program(vectors, norms, *inputs(*given)), expected, atol=2e-6, rtol=0)


def test_buckets_are_exact_at_every_limit() -> None:
    limits = reference.bucket_limits(128)
    near = {limit + step for limit in limits for step in (-1, 0, 1)} | {0, 1, 2}
    near = sorted(distance for distance in near if distance < 2**62)
    weight = torch.arange(129, dtype=torch.float32)
    for first in range(0, len(near), 16):
        times = torch.tensor(near[first : first + 16])
        zeros = torch.zeros_like(times)
        offsets = torch.zeros(2, dtype=torch.int64)
        expected = reference.bucket_weights(times, zeros, weight)
        torch.testing.assert_close(padded.bucket_weights(times, zeros, offsets, weight)[0], expected, atol=0, rtol=0)


def test_zero_rows_have_vectors_of_zeros() -> None:
    rows = torch.zeros(2, 4)
    assert (table_norms(rows) > 0).all()


def test_features_are_refused() -> None:
    model = RetrievalModel(build("hstu").config, features={"tab": 4})
    with pytest.raises(UserError, match=r"reads features of events \(tab\).*without the features"):
        UserGraph(model)


@register("block", "test-reads-offsets")
class ReadsOffsets(Block):
    """A block of somebody else's that goes through the sequences one by one."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        pass

    def forward(self, x_td: Tensor, tokens) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.cat(
            [x_td[start:stop] for start, stop in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)]
        )


@register("block", "test-own-operators")
class OwnOperators(Block):
    """A block of somebody else's that consists of our operators and PyTorch's on single tokens."""

    def __init__(self, config, site, options=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__(config, site, options)
        self.weight = nn.Parameter(torch.eye(self.dim))
        self.bias = nn.Parameter(torch.zeros(self.num_time_buckets + 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        pass

    def forward(self, x_td: Tensor, tokens) -> Tensor:  # type: ignore[no-untyped-def]
        heads = self.split_heads(x_td, self.qk_dim)
        no_position = self.bias.new_zeros(2 * self.max_len - 1)
        bias = RelativeBias(tokens.next_times, tokens.times, no_position, self.bias)
        mixed = hstu_attention(heads, heads, heads, tokens.offsets, bias, max_len=self.max_len)
        return x_td + mixed.flatten(1) @ self.weight


def test_a_block_of_our_operators_comes_along() -> None:
    assert trace_user_graph(build("test-own-operators"), NUM_ITEMS) is not None


def test_a_block_that_cannot_be_traced_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="the block 'test-reads-offsets' with the mask 'causal' cannot be exported"):
        trace_user_graph(build("test-reads-offsets"), NUM_ITEMS)


def test_fuxi_linear_is_refused_with_the_operator_that_is_missing() -> None:
    with pytest.raises(UserError, match="has no form for padded sequences"):
        trace_user_graph(build("fuxi-linear"), NUM_ITEMS)


def test_an_operator_without_a_padded_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_operators", dict(registry._operators))
    registry.register_operator("test_jagged_only", reference=lambda x: x)
    with padded_operators(), pytest.raises(UserError, match=r"operator 'test_jagged_only' has no form for padded"):
        registry.find_operator("test_jagged_only")(torch.zeros(1))
    assert registry.find_operator("test_jagged_only")(torch.ones(1)) == 1
