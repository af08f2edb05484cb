from __future__ import annotations

import pytest
import torch

from turbogr.config import ModelConfig
from turbogr.models.flops import block_parameters, counted_cost, nominal_flops, strict_flops


@pytest.mark.parametrize(("name", "products"), [("hstu", 2), ("sasrec", 2), ("fuxi-alpha", 4), ("fuxi", 4)])
def test_nominal_is_the_formula_that_fits_the_published_utilisation(name: str, products: int) -> None:
    config = ModelConfig(name=name, preset="large")  # type: ignore[arg-type]
    per_sample = 6 * block_parameters(config) * 2048 + 6 * products * 2048**2 * 1024 * 16
    assert nominal_flops(config, 3) == 3 * per_sample


D, H, QK, V, FFN, BLOCKS = 4, 2, 5, 7, 6, 3
WEIGHTS = {
    "hstu": D * H * (2 * V + 2 * QK) + H * V * D,
    "sasrec": D * H * (2 * QK + V) + H * V * D + 2 * D * FFN,
    "fuxi-alpha": D * H * (3 * V + V + 2 * QK) + 3 * H * V * D + 3 * D * FFN,
    "fuxi-beta": D * H * (2 * V + V) + 2 * H * V * D + 3 * D * FFN,
    "fuxi-gamma": D * H * (2 * V + V) + 2 * H * V * D + 3 * D * FFN,
    "fuxi": D * H * (3 * V + V + 2 * QK) + 3 * H * V * D + 3 * D * FFN,
    # W of U, Q, K, V; the projections of values; W_o; and recurrences: of retention QK x V numbers a head, of
    # times two a column, of positions 32 a column, each written and read once.
    "fuxi-linear": D * H * (4 * V + 2 * QK)
    + 2 * D * H * V
    + 3 * H * V * D
    + 3 * D * FFN
    + 2 * (H * QK * V + 2 * H * V + 32 * H * V),
}
PER_PAIR = {
    "hstu": QK + V,
    "sasrec": QK + V,
    "fuxi": QK + 3 * V,
    "fuxi-alpha": QK + 3 * V,
    "fuxi-beta": 2 * V,
    "fuxi-gamma": 2 * V,
    "fuxi-linear": 0,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_strict_counts_real_tokens_and_the_causal_half(name: str) -> None:
    config = ModelConfig(
        name=name,  # type: ignore[arg-type]
        dim=D,
        num_blocks=BLOCKS,
        num_heads=H,
        qk_dim=QK,
        v_dim=V,
        max_len=10,
        ffn_multiplier=FFN / D,
    )
    lengths = torch.tensor([3, 0, 1])
    pairs = (1 + 2 + 3) + 1
    forward = 4 * 2 * BLOCKS * WEIGHTS[name] + 2 * pairs * BLOCKS * H * PER_PAIR[name] + 4 * 2 * (6 + 1) * D
    assert strict_flops(config, lengths, num_negatives=6) == 3 * forward


def test_the_counted_cost_of_sequences_is_their_strict_flops() -> None:
    config = ModelConfig(name="fuxi-alpha", preset="small")
    lengths = torch.tensor([1, 7, 2048])
    expected = [strict_flops(config, lengths[i : i + 1], 128) for i in range(3)]
    assert counted_cost(config, 128).cost(lengths.numpy()).tolist() == pytest.approx(expected)


def test_a_linear_block_costs_the_same_for_every_token() -> None:
    config = ModelConfig(name="fuxi-linear", preset="small")
    short, long = (strict_flops(config, torch.tensor([length]), 128) for length in (10, 2000))
    assert long == 200 * short
    assert counted_cost(config, 128).b == 0
