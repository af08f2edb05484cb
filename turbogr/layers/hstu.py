"""The HSTU block (Zhai et al., ICML 2024): gated SiLU attention with relative position and time bias.

Shape legend: T tokens, D model width, h heads, d and e the sizes of a head of q/k and of u/v.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from turbogr.config import ModelConfig
from turbogr.layers.block import Block, PublicNames
from turbogr.layers.positions import spread_positions
from turbogr.layers.tokens import Tokens
from turbogr.ops import RelativeBias, gated_linear, hstu_attention, norm_linear_pieces
from turbogr.plugins import register

_EPS = 1e-6


@register("block", "hstu")
class HSTUBlock(Block):
    """x + W_o · dropout(U ⊙ norm(A·V)) + b with A_ij = SiLU(q_i·k_j + bias_ij) / max_len, U, V, Q, K = SiLU(norm(x)·W).

    Notable choices: norms have no parameters, one bias table per block serves all heads, and the bias looks at the
    time of the item to be predicted, not of the last one seen.
    """

    title = "HSTU"
    num_sites = 1
    unused_sizes: ClassVar = {"ffn_multiplier": "feed-forward part"}
    public_names = PublicNames(
        "_hstu._attention_layers.",
        {
            "uvqk": "_uvqk",
            "position_weight": "_rel_attn_bias._pos_w",
            "time_weight": "_rel_attn_bias._ts_w",
            "out_weight": "_o.weight",
            "out_bias": "_o.bias",
        },
    )

    def __init__(self, config: ModelConfig, site: int, options: None = None) -> None:
        super().__init__(config, site, options)
        h = self.num_heads
        self.uvqk = nn.Parameter(torch.empty(self.dim, 2 * h * (self.v_dim + self.qk_dim)))
        self.position_weight = nn.Parameter(torch.empty(2 * self.max_distance - 1))
        self.time_weight = nn.Parameter(torch.empty(self.num_time_buckets + 1))
        self.out_weight = nn.Parameter(torch.empty(h * self.v_dim, self.dim))
        self.out_bias = nn.Parameter(torch.empty(self.dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for parameter in (self.uvqk, self.position_weight, self.time_weight):
            nn.init.normal_(parameter, std=0.02, generator=generator)
        nn.init.xavier_uniform_(self.out_weight, generator=generator)
        nn.init.zeros_(self.out_bias)

    def products_per_pair(self) -> int:
        return self.num_heads * (self.qk_dim + self.v_dim)

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        h = self.num_heads
        widths = [h * self.v_dim, h * self.v_dim, h * self.qk_dim, h * self.qk_dim]
        u, v, q, k = norm_linear_pieces(x_td, self.uvqk, widths=widths, norm="layer", activation="silu", eps=_EPS)
        position_weight = spread_positions(self.position_weight, self.max_len)
        attended = hstu_attention(
            self.split_heads(q, self.qk_dim),
            self.split_heads(k, self.qk_dim),
            self.split_heads(v, self.v_dim),
            tokens.offsets,
            RelativeBias(tokens.next_times, tokens.times, position_weight, self.time_weight),
            max_len=self.max_len,
            visible=tokens.visible,
        )
        return gated_linear(
            attended.flatten(1),
            u,
            x_td,
            self.out_weight,
            self.out_bias,
            norm="layer",
            eps=_EPS,
            dropout=tokens.dropout(self.dropout, self.site),
            keys=tokens.keys,
        )
