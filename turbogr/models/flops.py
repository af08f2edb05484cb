"""How much arithmetic a training step is, for the model FLOPs utilisation (MFU).

`strict` counts what must be computed: real tokens and the causal half of attention. `nominal` counts every sequence at
the model's full length, padding and the masked half included, which is how figures are often published. Both count
forward and backward (three times the forward); recomputation, look-ups, norms and optimisers earn nothing.

Parameters are counted from the model itself, built without memory, so no formula can fall behind the layers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.config import ModelConfig
from turbogr.data.cost import CostModel
from turbogr.models.retrieval import RetrievalModel


class _Products(NamedTuple):
    """Attention products per block and head: of q and k, and of weights and v."""

    qk: int
    v: int


_PRODUCTS = {
    "hstu": _Products(1, 1),
    "sasrec": _Products(1, 1),
    "fuxi-alpha": _Products(1, 3),
    "fuxi-beta": _Products(0, 2),
    "fuxi-gamma": _Products(1, 3),
}


class _Counts(NamedTuple):
    """Of all blocks together: parameters, those among them in matrices, multiply-adds per pair of tokens."""

    parameters: int
    weights: int
    per_pair: int


def strict_flops(config: ModelConfig, lengths: Tensor, num_negatives: int) -> float:
    """FLOPs of one training step on sequences of `lengths` [B]."""
    config = config.with_preset()
    assert config.dim, "resolve the config first"
    counts = _count(config)
    lengths = lengths.double()
    tokens = float(lengths.sum())
    pairs = float((lengths * (lengths + 1) / 2).sum())
    logits = (num_negatives + 1) * config.dim
    forward = 2 * tokens * (counts.weights + logits) + 2 * pairs * counts.per_pair
    return 3 * forward


def counted_cost(config: ModelConfig, num_negatives: int) -> CostModel:
    """Return the cost of a sequence in FLOPs, for balancing without a measurement: that of `strict_flops`."""
    config = config.with_preset()
    assert config.dim, "resolve the config first"
    counts = _count(config)
    linear = 6 * (counts.weights + (num_negatives + 1) * config.dim)
    return CostModel(a=float(linear + 3 * counts.per_pair), b=float(3 * counts.per_pair))


def nominal_flops(config: ModelConfig, num_sequences: int) -> float:
    """FLOPs of one training step when every sequence counts as `max_len` long and attention as a full square."""
    config = config.with_preset()
    assert config.max_len, "resolve the config first"
    counts, n = _count(config), config.max_len
    return num_sequences * (6 * counts.parameters * n + 6 * counts.per_pair * n * n)


def block_parameters(config: ModelConfig) -> int:
    """All parameters of the blocks: projections, their bias, and the tables of the relative bias."""
    return _count(config).parameters


@lru_cache
def _count(config: ModelConfig) -> _Counts:
    with torch.device("meta"):
        model = RetrievalModel(config)
    parameters = list(model.blocks.parameters())
    products, sizes = _PRODUCTS[config.name], model.config
    assert sizes.num_blocks and sizes.num_heads and sizes.qk_dim and sizes.v_dim
    return _Counts(
        parameters=sum(parameter.numel() for parameter in parameters),
        weights=sum(parameter.numel() for parameter in parameters if parameter.dim() == 2),
        per_pair=sizes.num_blocks * sizes.num_heads * (products.qk * sizes.qk_dim + products.v * sizes.v_dim),
    )
