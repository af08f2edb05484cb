"""Masks: what tokens see, how many pairs that is, and what retrieval refuses."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_retrieval_model import NUM_ITEMS, make_batch
from turbogr.config import ModelConfig, load_config
from turbogr.errors import UserError
from turbogr.layers.attention_masks import CausalMask, Mask, WindowConfig, WindowMask, make_mask
from turbogr.layers.tokens import Tokens
from turbogr.models import RetrievalModel
from turbogr.models.flops import strict_flops
from turbogr.ops import KeyRanges, causal_ranges
from turbogr.plugins import built_in_names, find

LENGTHS = torch.tensor([5, 0, 1, 9])


def tokens_of(lengths: torch.Tensor) -> Tokens:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    zeros = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    return Tokens(offsets, zeros, zeros, zeros, None)


def test_positions_start_at_0_in_every_sequence():
    assert tokens_of(LENGTHS).positions().tolist() == [*range(5), 0, *range(9)]


def test_a_window_ends_at_the_token_itself():
    visible = WindowMask(WindowConfig(3)).ranges(tokens_of(LENGTHS))
    assert visible.first.tolist()[:5] == [0, 0, 0, 1, 2]
    assert visible.last.tolist()[:5] == [1, 2, 3, 4, 5]


def test_a_window_longer_than_the_sequences_is_causal():
    tokens = tokens_of(LENGTHS)
    for ours, causal in zip(WindowMask(WindowConfig(9)).ranges(tokens), causal_ranges(tokens.offsets), strict=True):
        assert torch.equal(ours, causal)


class _Itself(Mask):
    """Tokens see themselves besides a range in which they are not."""

    def ranges(self, tokens: Tokens) -> KeyRanges:
        position = tokens.positions()
        return KeyRanges(torch.zeros_like(position), (position - 1).clamp(min=0))


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [(CausalMask(), 15 + 1 + 45), (WindowMask(WindowConfig(2)), 9 + 1 + 17), (_Itself(), 5 + 6 + 1 + 9 + 28)],
)
def test_pairs_are_those_that_see_each_other(mask, pairs):
    assert mask.num_pairs(LENGTHS) == pairs


def test_flops_count_what_the_mask_leaves():
    sizes = {"dim": 4, "num_heads": 2, "max_len": 16}
    causal, window = ModelConfig(**sizes), ModelConfig(**sizes, mask="window")
    options = {"window": WindowConfig(2)}
    difference = strict_flops(causal, LENGTHS, 0) - strict_flops(window, LENGTHS, 0, options)
    num_blocks, per_pair = 2, 2 * (2 + 2)
    assert difference == 3 * 2 * num_blocks * per_pair * (61 - 27)
    assert strict_flops(window, LENGTHS, 0, {"window": WindowConfig(9)}) == strict_flops(causal, LENGTHS, 0)


def test_the_size_comes_from_the_config(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {mask: window}\nwindow: {size: 7}\n")
    config = load_config(recipe)
    assert make_mask(config.model, config.options).options == WindowConfig(7)
    assert make_mask(config.model).options == WindowConfig()
    with pytest.raises(UserError, match=r"window\.size must be positive"):
        load_config(recipe, ["window.size=0"])


@pytest.mark.parametrize(
    "name", [name for name in built_in_names("block") if not find("block", name).factory.only_causal]
)
def test_with_two_blocks_an_output_depends_on_two_windows(name):
    config = ModelConfig(name=name, mask="window", dim=16, num_heads=2, max_len=12, dropout=0.0)
    model = RetrievalModel(config, options={"window": WindowConfig(3)})
    model.reset_parameters(torch.Generator().manual_seed(0))
    table = torch.randn(NUM_ITEMS, 16, generator=torch.Generator().manual_seed(1))
    batch = make_batch([12])
    rows = table[batch.items.values].requires_grad_()
    outputs = model.encode(rows, torch.arange(12), batch)
    (touched,) = torch.autograd.grad(outputs[9].sum(), rows)
    assert (touched.abs().amax(1) > 0).tolist() == [False] * 5 + [True] * 5 + [False] * 2


def test_retrieval_refuses_a_mask_that_sees_the_future():
    class Peek(Mask):
        def ranges(self, tokens: Tokens) -> KeyRanges:
            position = tokens.positions()
            return KeyRanges(torch.zeros_like(position), torch.where(position == 2, 5, position + 1))

    model = RetrievalModel(ModelConfig(dim=8, max_len=12))
    model.reset_parameters(torch.Generator().manual_seed(0))
    model.mask = Peek()
    batch = make_batch([6, 7])
    with pytest.raises(UserError, match="the mask 'causal' lets position 2 of a sequence see position 4"):
        model.encode(torch.zeros(NUM_ITEMS, 8), batch.items.values, batch)
