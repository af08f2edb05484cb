from __future__ import annotations

import pytest
import torch

from turbogr.config import ModelConfig
from turbogr.models import RetrievalModel
from turbogr.models.flops import block_parameters, nominal_flops, strict_flops


def paper_config(dim: int, num_blocks: int) -> ModelConfig:
    return ModelConfig(
        dim=dim,
        num_blocks=num_blocks,
        num_heads=8,
        qk_dim=dim // 8,
        v_dim=dim // 8,
        max_len=2048,
        num_time_buckets=32,
    )


@pytest.mark.parametrize(
    ("dim", "num_blocks", "millions"), [(128, 2, 0.17), (256, 4, 1.33), (512, 8, 10.52), (1024, 16, 83.97)]
)
def test_dense_parameters_are_those_of_the_paper(dim: int, num_blocks: int, millions: float) -> None:
    config = paper_config(dim, num_blocks)
    assert round(block_parameters(config) / 1e6, 2) == millions
    with torch.device("meta"):
        model = RetrievalModel(config)
    assert model.num_parameters() == block_parameters(config) + 2048 * dim


def test_nominal_is_the_formula_that_fits_the_published_utilisation() -> None:
    config = paper_config(1024, 16)
    per_sample = 6 * block_parameters(config) * 2048 + 6 * 2 * 2048**2 * 1024 * 16
    assert nominal_flops(config, 3) == 3 * per_sample


def test_strict_counts_real_tokens_and_the_causal_half() -> None:
    config = ModelConfig(dim=4, num_blocks=3, num_heads=2, qk_dim=5, v_dim=7, max_len=10)
    lengths = torch.tensor([3, 0, 1])
    weights = 3 * (4 * 2 * 2 * (5 + 7) + 2 * 7 * 4)
    pairs = (1 + 2 + 3) + 1
    forward = 4 * 2 * weights + 2 * pairs * 3 * 2 * (5 + 7) + 4 * 2 * (6 + 1) * 4
    assert strict_flops(config, lengths, num_negatives=6) == 3 * forward
