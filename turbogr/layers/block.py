"""What every block of a sequence model shares: its sizes, and its own places for dropout."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from turbogr.config import ModelConfig
from turbogr.layers.tokens import Tokens


class Block(nn.Module):
    """One step [T, D] -> [T, D] over jagged tokens. The config's sizes must be set; parameters have no values until
    `reset_parameters`.

    `num_sites` counts the places where a block drops; they are numbered from `site` on.
    """

    num_sites: ClassVar[int]

    def __init__(self, config: ModelConfig, site: int) -> None:
        super().__init__()
        config = config.with_preset()
        assert config.dim and config.num_heads and config.qk_dim and config.v_dim, "resolve the config first"
        assert config.max_len and config.num_time_buckets, "resolve the config first"
        self.dim, self.num_heads, self.qk_dim, self.v_dim = config.dim, config.num_heads, config.qk_dim, config.v_dim
        self.max_len, self.num_time_buckets = config.max_len, config.num_time_buckets
        self.max_distance = min(config.max_distance or self.max_len, self.max_len)
        self.ffn_dim, self.dropout, self.site = config.ffn_dim, config.dropout, site

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all parameters anew; the same generator state gives the same parameters."""
        raise NotImplementedError

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        raise NotImplementedError

    def split_heads(self, x: Tensor, head_dim: int) -> Tensor:
        """View [T, h · head_dim] as [T, h, head_dim]."""
        return x.view(x.shape[0], self.num_heads, head_dim)
