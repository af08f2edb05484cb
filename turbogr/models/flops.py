"""How much arithmetic a training step is, for the model FLOPs utilisation (MFU).

`strict` counts what must be computed: real tokens and the causal half of attention. `nominal` counts every sequence at
the model's full length, padding and the masked half included, which is how figures are often published. Both count
forward and backward (three times the forward); recomputation, look-ups, norms and optimisers earn nothing.
"""

from __future__ import annotations

from torch import Tensor

from turbogr.config import ModelConfig


def strict_flops(config: ModelConfig, lengths: Tensor, num_negatives: int) -> float:
    """FLOPs of one training step on sequences of `lengths` [B]."""
    lengths = lengths.double()
    tokens = float(lengths.sum())
    pairs = float((lengths * (lengths + 1) / 2).sum())
    forward = tokens * _per_token(config, num_negatives) + 2 * pairs * _attention_width(config)
    return 3 * forward


def nominal_flops(config: ModelConfig, num_sequences: int) -> float:
    """FLOPs of one training step when every sequence counts as `max_len` long and attention as a full square."""
    assert config.max_len and config.dim
    n = config.max_len
    return num_sequences * (6 * block_parameters(config) * n + 6 * _attention_width(config) * n * n)


def block_parameters(config: ModelConfig) -> int:
    """All parameters of the blocks: projections, their bias, and the tables of the relative bias."""
    assert config.dim and config.max_len
    tables = 2 * config.max_len - 1 + config.num_time_buckets + 1
    return _block_weights(config) + config.num_blocks * (config.dim + tables)


def _block_weights(config: ModelConfig) -> int:
    """Weights that multiply every token, in all blocks."""
    assert config.dim and config.qk_dim and config.v_dim
    projections = 2 * config.dim * config.num_heads * (config.qk_dim + config.v_dim)
    output = config.num_heads * config.v_dim * config.dim
    return config.num_blocks * (projections + output)


def _per_token(config: ModelConfig, num_negatives: int) -> float:
    assert config.dim
    return 2 * _block_weights(config) + 2 * (num_negatives + 1) * config.dim


def _attention_width(config: ModelConfig) -> int:
    """Multiply-adds per pair of tokens in all blocks: q·k and the weighted sum of v."""
    assert config.qk_dim and config.v_dim
    return config.num_blocks * config.num_heads * (config.qk_dim + config.v_dim)
