"""The FuXi blocks (Ye et al., 2025): attention in separate channels, then a gated feed-forward part.

Alpha looks times up in buckets; gamma computes them by a learned decay; beta is gamma without the content channel.
Shape legend: T tokens, D model width, h heads, d and e the sizes of a head of q/k and of v, c channels.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.config import ModelConfig
from turbogr.layers.block import Block, PublicNames
from turbogr.layers.positions import spread_positions
from turbogr.layers.tokens import Tokens
from turbogr.ops import (
    DecayBias,
    RelativeBias,
    fuxi_attention,
    gated_linear,
    gated_mlp,
    norm_linear_pieces,
)
from turbogr.plugins import register

_EPS = 1e-6
_START_DECAY = (0.02, 0.25, 0.8)  # a, β, γ: near a flat average; a as large as the other tables' entries

_NO_BUCKETS = {"num_time_buckets": "table of time buckets"}


class FuXiBlock(Block):
    """o = x + W_o · dropout(U ⊙ norm(C)) + b, then o + W_2 · (SiLU(W_1 ô) ⊙ W_3 ô) with ô = dropout(norm(o)).

    C holds the channels of every head side by side (position, time, content), U, V, Q, K = SiLU(norm(x)·W), and norm
    is RMSNorm without parameters. Tables serve all heads, and times are distances to the item to be predicted.
    """

    num_sites = 2
    by_content: ClassVar[bool] = True
    by_decay: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, site: int, options: None = None) -> None:
        super().__init__(config, site, options)
        h = self.num_heads
        self.num_channels = 3 if self.by_content else 2
        qk_width = h * self.qk_dim if self.by_content else 0
        self.widths = [self.num_channels * h * self.v_dim, h * self.v_dim, qk_width, qk_width]
        self.uvqk = nn.Parameter(torch.empty(self.dim, sum(self.widths)))
        self.position_weight = nn.Parameter(torch.empty(2 * self.max_distance - 1))
        self.time_weight = nn.Parameter(torch.empty(3 if self.by_decay else self.num_time_buckets + 1))
        self.out_weight = nn.Parameter(torch.empty(self.num_channels * h * self.v_dim, self.dim))
        self.out_bias = nn.Parameter(torch.empty(self.dim))
        self.ffn_gate = nn.Parameter(torch.empty(self.dim, self.ffn_dim))
        self.ffn_up = nn.Parameter(torch.empty(self.dim, self.ffn_dim))
        self.ffn_down = nn.Parameter(torch.empty(self.ffn_dim, self.dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for parameter in (self.uvqk, self.position_weight):
            nn.init.normal_(parameter, std=0.02, generator=generator)
        if self.by_decay:
            with torch.no_grad():
                self.time_weight.copy_(_free(*_START_DECAY))
        else:
            nn.init.normal_(self.time_weight, std=0.02, generator=generator)
        for parameter in (self.out_weight, self.ffn_gate, self.ffn_up, self.ffn_down):
            nn.init.xavier_uniform_(parameter, generator=generator)
        nn.init.zeros_(self.out_bias)

    def products_per_pair(self) -> int:
        content = self.qk_dim if self.by_content else 0
        return self.num_heads * (content + self.num_channels * self.v_dim)

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        u, v, q, k = norm_linear_pieces(x_td, self.uvqk, widths=self.widths, norm="rms", activation="silu", eps=_EPS)
        attended = fuxi_attention(
            self.split_heads(q, self.qk_dim) if self.by_content else None,
            self.split_heads(k, self.qk_dim) if self.by_content else None,
            self.split_heads(v, self.v_dim),
            tokens.offsets,
            self._bias(tokens),
            max_len=self.max_len,
            visible=tokens.visible,
        )
        mixed = gated_linear(
            attended.flatten(1),
            u,
            x_td,
            self.out_weight,
            self.out_bias,
            norm="rms",
            eps=_EPS,
            dropout=tokens.dropout(self.dropout, self.site),
            keys=tokens.keys,
        )
        return gated_mlp(
            mixed,
            self.ffn_gate,
            self.ffn_up,
            self.ffn_down,
            norm="rms",
            eps=_EPS,
            dropout=tokens.dropout(self.dropout, self.site + 1),
            keys=tokens.keys,
        )

    def _bias(self, tokens: Tokens) -> RelativeBias | DecayBias:
        position_weight = spread_positions(self.position_weight, self.max_len)
        if self.by_decay:
            return DecayBias(tokens.next_times, tokens.times, position_weight, constrain_decay(self.time_weight))
        return RelativeBias(tokens.next_times, tokens.times, position_weight, self.time_weight)


@register("block", "fuxi-alpha")
class FuXiAlphaBlock(FuXiBlock):
    """Bucketed times; position, time and content channels."""

    title = "FuXi-alpha"
    public_names = PublicNames(
        "_fuxi._attention_layers.",
        {
            "uvqk": "_uvqk",
            "position_weight": "_rel_attn_bias._pos_w",
            "time_weight": "_rel_attn_bias._ts_w",
            "out_weight": "_mffn.lin0.weight",
            "out_bias": "_mffn.lin0.bias",
            "ffn_gate": "_mffn.lin1.weight",
            "ffn_down": "_mffn.lin2.weight",
            "ffn_up": "_mffn.lin3.weight",
        },
    )


@register("block", "fuxi-gamma")
class FuXiGammaBlock(FuXiBlock):
    """Times by a learned decay a · γ^(x^β); position, time and content channels."""

    title = "FuXi-gamma"
    unused_sizes: ClassVar = _NO_BUCKETS
    by_decay = True


@register("block", "fuxi-beta")
class FuXiBetaBlock(FuXiBlock):
    """Times by a learned decay; position and time channels only, so that attention needs no q and k."""

    title = "FuXi-beta"
    unused_sizes: ClassVar = _NO_BUCKETS
    by_content = False
    by_decay = True


def constrain_decay(free: Tensor) -> Tensor:
    """Map three free numbers to a, β > 0 and γ in (0, 1)."""
    amplitude, exponent, base = free.unbind()
    return torch.stack([amplitude, F.softplus(exponent), torch.sigmoid(base)])


def _free(amplitude: float, exponent: float, base: float) -> Tensor:
    """The numbers that `constrain_decay` maps to these."""
    return torch.tensor([amplitude, math.log(math.expm1(exponent)), math.log(base / (1 - base))])
