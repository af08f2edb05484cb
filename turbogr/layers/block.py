"""The interface of a block, which turns the vectors of a batch's tokens into new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from turbogr.config import ModelConfig
from turbogr.layers.tokens import Tokens


class PublicNames(NamedTuple):
    """How a public implementation names the parameters of a block: `prefix`, the block's number, ".", and `names` by
    ours."""

    prefix: str
    names: Mapping[str, str]


class Block(nn.Module):
    """[T, D] -> [T, D], for T tokens of width D. Register one with `@register("block", name)` to choose it by name.

    The config must be resolved: every size is set. `site` is the first of the block's `num_sites` numbers for dropout:
    `tokens.dropout(rate, site + i)` drops independently for every number. `options` is the block's own section of the
    config, None if it has none. Parameters have no values until `reset_parameters`.

    What is known of a block without building it:
        title: its name as people write it; empty means its registered name.
        num_sites: how many numbers for dropout it uses.
        unused_sizes: settings of the model's config that mean nothing to it, and the part that it does not have.
        public_names: the names that a public implementation gives its parameters, None if they are ours.
        only_causal: it sees all earlier tokens and cannot be given another mask.
        looked_up: names of parameters of two dimensions that are looked up, not multiplied with.
    """

    title: ClassVar[str] = ""
    num_sites: ClassVar[int] = 0
    unused_sizes: ClassVar[Mapping[str, str]] = {}
    public_names: ClassVar[PublicNames | None] = None
    only_causal: ClassVar[bool] = False
    looked_up: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, site: int, options: Any = None) -> None:
        super().__init__()
        config = config.with_preset()
        assert config.dim and config.num_heads and config.qk_dim and config.v_dim, "resolve the config first"
        assert config.max_len and config.num_time_buckets, "resolve the config first"
        self.dim, self.num_heads, self.qk_dim, self.v_dim = config.dim, config.num_heads, config.qk_dim, config.v_dim
        self.max_len, self.num_time_buckets = config.max_len, config.num_time_buckets
        self.max_distance = min(config.max_distance or self.max_len, self.max_len)
        self.ffn_dim, self.dropout, self.site, self.options = config.ffn_dim, config.dropout, site, options

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all parameters; the same generator state gives the same parameters."""
        raise NotImplementedError

    def join(self, first: Block) -> None:
        """Called once when a model is built, with its first block, whose parameters this one may share."""

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        raise NotImplementedError

    def products_per_pair(self) -> int:
        """Multiply-adds for every pair of tokens of which one sees the other: those of attention, 0 without it.

        Products with matrices of parameters are counted from the parameters.
        """
        return 0

    def products_per_token(self) -> int:
        """Multiply-adds for every token besides those with matrices of parameters, such as of a recurrence."""
        return 0

    def split_heads(self, x: Tensor, head_dim: int) -> Tensor:
        """View [T, h · head_dim] as [T, h, head_dim]."""
        return x.view(x.shape[0], self.num_heads, head_dim)
