"""The STU block: the HSTU layer of Meta's public ranking model (generative-recommenders, `DlrmHSTU`).

Shape legend: T tokens, D model width, h heads, d and e the sizes of a head of q/k and of u/v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.config import ModelConfig
from turbogr.layers.block import Block, PublicNames
from turbogr.layers.tokens import Tokens
from turbogr.ops import RelativeBias, gated_linear, hstu_attention, keyed_dropout, norm_linear_pieces
from turbogr.plugins import register

_EPS = 1e-6


@dataclass(frozen=True)
class STUConfig:
    """Options of the STU block. `group_norm` normalises the attention's output per head, with one weight and one bias a
    head, instead of over all heads. `time_bias` adds a learned number to a query and a key by the time between them, in
    `model.num_time_buckets` buckets; the public block has none.
    """

    group_norm: bool = False
    time_bias: bool = False


@register("block", "stu", config=STUConfig)
class STUBlock(Block):
    """x + dropout([U, O, U ⊙ norm(O)]) · W_o with O = A·V, A_ij = SiLU(q_i·k_j / √d) / max_len.

    U' V Q K = norm(x)·W + b and U = SiLU(U'). Both norms are LayerNorms with weight and bias.
    """

    title = "STU"
    num_sites = 1
    unused_sizes: ClassVar = {"ffn_multiplier": "feed-forward part"}
    public_names = PublicNames(
        "_hstu_transducer._stu_module._stu_layers.",
        {
            "uvqk": "_uvqk_weight",
            "uvqk_bias": "_uvqk_beta",
            "input_norm_weight": "_input_norm_weight",
            "input_norm_bias": "_input_norm_bias",
            "out_weight": "_output_weight",
            "output_norm_weight": "_output_norm_weight",
            "output_norm_bias": "_output_norm_bias",
        },
    )

    def __init__(self, config: ModelConfig, site: int, options: STUConfig | None = None) -> None:
        super().__init__(config, site, options)
        self.options = options = options or STUConfig()
        h, width = self.num_heads, self.num_heads * self.v_dim
        self.widths = [width, width, h * self.qk_dim, h * self.qk_dim]
        self.input_norm_weight = nn.Parameter(torch.empty(self.dim))
        self.input_norm_bias = nn.Parameter(torch.empty(self.dim))
        self.uvqk = nn.Parameter(torch.empty(self.dim, sum(self.widths)))
        self.uvqk_bias = nn.Parameter(torch.empty(sum(self.widths)))
        self.output_norm_weight = nn.Parameter(torch.empty(h if options.group_norm else width))
        self.output_norm_bias = nn.Parameter(torch.empty(h if options.group_norm else width))
        self.out_weight = nn.Parameter(torch.empty(3 * width, self.dim))
        if options.time_bias:
            self.time_weight = nn.Parameter(torch.empty(self.num_time_buckets + 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for parameter in (self.uvqk, self.out_weight):
            nn.init.xavier_uniform_(parameter, generator=generator)
        for parameter in (self.input_norm_weight, self.output_norm_weight):
            nn.init.ones_(parameter)
        for parameter in (self.input_norm_bias, self.output_norm_bias, self.uvqk_bias):
            nn.init.zeros_(parameter)
        if self.options.time_bias:
            nn.init.normal_(self.time_weight, std=0.02, generator=generator)

    def products_per_pair(self) -> int:
        return self.num_heads * (self.qk_dim + self.v_dim)

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        # The norm's weight and bias are part of the projection, so that one operator computes all of it.
        u, v, q, k = norm_linear_pieces(
            x_td,
            self.input_norm_weight[:, None] * self.uvqk,
            self.uvqk_bias + self.input_norm_bias @ self.uvqk,
            widths=self.widths,
            norm="layer",
            activation="none",
            eps=_EPS,
        )
        u = F.silu(u)
        attended = hstu_attention(
            self.split_heads(q, self.qk_dim),
            self.split_heads(k, self.qk_dim),
            self.split_heads(v, self.v_dim),
            tokens.offsets,
            self._bias(tokens),
            max_len=self.max_len,
            visible=tokens.visible,
            alpha=self.qk_dim**-0.5,
        )
        dropout = tokens.dropout(self.dropout, self.site)
        if dropout is None and not self.options.group_norm:
            return self._project(u, attended.flatten(1), x_td)
        parts = torch.cat([u, attended.flatten(1), u * self._norm(attended)], dim=1)
        return x_td + keyed_dropout(parts, dropout, tokens.keys) @ self.out_weight.to(x_td.dtype)

    def _project(self, u: Tensor, attended: Tensor, x_td: Tensor) -> Tensor:
        """[U, O, U ⊙ (Ô ⊙ w + b)] · W_o as U·(W_u + diag(b)·W_y) + O·W_o + (U ⊙ Ô)·diag(w)·W_y, with Ô = norm(O)."""
        to_u, to_o, to_y = self.out_weight.chunk(3)
        weight = torch.cat([to_u + self.output_norm_bias[:, None] * to_y, to_o]).to(x_td.dtype)
        mixed = torch.addmm(x_td, torch.cat([u, attended], dim=1), weight)
        gated: Tensor = gated_linear(
            attended, u, mixed, self.output_norm_weight[:, None] * to_y, norm="layer", eps=_EPS
        )
        return gated

    def _norm(self, attended_the: Tensor) -> Tensor:
        """Return the normalised output of the attention, [T, h · e]."""
        dtype = attended_the.dtype
        weight, bias = self.output_norm_weight.to(dtype), self.output_norm_bias.to(dtype)
        if self.options.group_norm:
            normal = F.layer_norm(attended_the, attended_the.shape[-1:], eps=_EPS)
            return (normal * weight[:, None] + bias[:, None]).flatten(1)
        return F.layer_norm(attended_the.flatten(1), weight.shape, weight, bias, _EPS)

    def _bias(self, tokens: Tokens) -> RelativeBias | None:
        if not self.options.time_bias:
            return None
        no_position = self.time_weight.new_zeros(2 * self.max_len - 1)
        return RelativeBias(tokens.next_times, tokens.times, no_position, self.time_weight)
