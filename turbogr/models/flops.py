"""How much arithmetic a training step is, for the model FLOPs utilisation (MFU).

`strict` counts what must be computed: real tokens and the pairs of them that see each other. `nominal` counts every
sequence at the model's full length, padding and the masked half included, which is how figures are often published.
A block that is linear in the length counts as the recurrence that it is, whatever a kernel does in chunks.
Both count forward and backward (three times the forward), but no recomputation, look-ups, norms or optimisers.

Parameters and attention are counted from the blocks themselves, built without memory, so that no list of formulas must
follow them. `options` are the sections of the config's components, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.config import ModelConfig
from turbogr.data.cost import CostModel
from turbogr.layers.attention_masks import make_mask
from turbogr.layers.block import Block
from turbogr.models.retrieval_model import RetrievalModel

Options = Mapping[str, Any]


class _Counts(NamedTuple):
    """Of all blocks together: parameters, those among them in matrices, further multiply-adds per token, and those per
    pair of tokens."""

    parameters: int
    weights: int
    per_token: int
    per_pair: int


def strict_flops(config: ModelConfig, lengths: Tensor, num_negatives: int, options: Options | None = None) -> float:
    """FLOPs of one training step on sequences of `lengths` [B]."""
    config = config.with_preset()
    assert config.dim, "resolve the config first"
    counts = _count(config, options)
    tokens = float(lengths.double().sum())
    pairs = make_mask(config, options).num_pairs(lengths)
    logits = (num_negatives + 1) * config.dim
    forward = 2 * tokens * (counts.weights + counts.per_token + logits) + 2 * pairs * counts.per_pair
    return 3 * forward


def counted_cost(config: ModelConfig, num_negatives: int, options: Options | None = None) -> CostModel:
    """Return the cost of a sequence in FLOPs, for balancing without a measurement: that of causal attention."""
    config = config.with_preset()
    assert config.dim, "resolve the config first"
    counts = _count(config, options)
    linear = 6 * (counts.weights + counts.per_token + (num_negatives + 1) * config.dim)
    return CostModel(a=float(linear + 3 * counts.per_pair), b=float(3 * counts.per_pair))


def nominal_flops(config: ModelConfig, num_sequences: int, options: Options | None = None) -> float:
    """FLOPs of one training step when every sequence counts as `max_len` long and attention as a full square."""
    config = config.with_preset()
    assert config.max_len, "resolve the config first"
    counts, n = _count(config, options), config.max_len
    return num_sequences * (6 * (counts.parameters + counts.per_token) * n + 6 * counts.per_pair * n * n)


def block_parameters(config: ModelConfig, options: Options | None = None) -> int:
    """All parameters of the blocks: projections, their bias, and the tables of the relative bias."""
    return _count(config, options).parameters


_counted: dict[tuple[ModelConfig, str], _Counts] = {}


def _count(config: ModelConfig, options: Options | None) -> _Counts:
    key = config, repr(options)
    if key not in _counted:
        with torch.device("meta"):
            blocks = RetrievalModel(config, options=options).blocks
        parameters = list(blocks.parameters())
        ours = [block for block in blocks if isinstance(block, Block)]
        matrices = [
            parameter.numel()
            for block in blocks
            for name, parameter in block.named_parameters()
            if parameter.dim() > 1 and not (isinstance(block, Block) and name in block.looked_up)
        ]
        _counted[key] = _Counts(
            parameters=sum(parameter.numel() for parameter in parameters),
            weights=sum(matrices),
            per_token=sum(block.products_per_token() for block in ours),
            per_pair=sum(block.products_per_pair() for block in ours),
        )
    return _counted[key]
