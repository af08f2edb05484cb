"""The SASRec block (Kang and McAuley, ICDM 2018): causal softmax attention and a feed-forward part.

As published, it follows the public implementation behind the figures that HSTU is compared with, which differs from a
textbook pre-norm Transformer: only the queries see the normalised input, and each residual goes around the normalised
vectors. The section `sasrec` chooses a Transformer block with the norms before or after, as strong baselines have it.
Shape legend: T tokens, D model width, h heads, d and e the sizes of a head of q/k and of v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.config import ModelConfig
from turbogr.layers.block import Block
from turbogr.layers.tokens import Tokens
from turbogr.ops import keyed_dropout, norm_linear, norm_linear_pieces, softmax_attention
from turbogr.plugins import register

_EPS = 1e-8


@dataclass(frozen=True)
class SASRecConfig:
    """Options of the SASRec block. `norm: published` is the block behind the published figures; `pre` and `post` are a
    Transformer's, with the norms before attention and feed-forward part or after their residuals. `activation` is that
    of the feed-forward part.
    """

    norm: Literal["published", "pre", "post"] = "published"
    activation: Literal["relu", "gelu"] = "relu"


@register("block", "sasrec", config=SASRecConfig)
class SASRecBlock(Block):
    """z = norm(n + dropout(W_o · attention(n, x, x))) with n = norm(x), then z + dropout(W_2 · dropout(ReLU(W_1 z))).

    That is `norm: published`. `pre` is z = x + dropout(W_o · attention(n, n, n)), then z plus the feed-forward part of
    norm(z); `post` is z = norm(x + dropout(W_o · attention(x, x, x))), then the norm of z plus that of z.
    `activation: gelu` takes GELU for ReLU. Norms have no parameters, every linear map has a bias. Attention weights are
    not dropped; its output is.
    """

    title = "SASRec"
    num_sites = 3
    unused_sizes: ClassVar = {"num_time_buckets": "table of time buckets"}

    def __init__(self, config: ModelConfig, site: int, options: SASRecConfig | None = None) -> None:
        super().__init__(config, site, options)
        self.options = options or SASRecConfig()
        h, dim, ffn_dim = self.num_heads, self.dim, self.ffn_dim
        self.query_weight = nn.Parameter(torch.empty(dim, h * self.qk_dim))
        self.query_bias = nn.Parameter(torch.empty(h * self.qk_dim))
        self.key_value_weight = nn.Parameter(torch.empty(dim, h * (self.qk_dim + self.v_dim)))
        self.key_value_bias = nn.Parameter(torch.empty(h * (self.qk_dim + self.v_dim)))
        self.out_weight = nn.Parameter(torch.empty(h * self.v_dim, dim))
        self.out_bias = nn.Parameter(torch.empty(dim))
        self.ffn_up = nn.Parameter(torch.empty(dim, ffn_dim))
        self.ffn_up_bias = nn.Parameter(torch.empty(ffn_dim))
        self.ffn_down = nn.Parameter(torch.empty(ffn_dim, dim))
        self.ffn_down_bias = nn.Parameter(torch.empty(dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        # queries, keys and values are drawn as the one matrix that they are in the public implementation
        width = self.query_weight.shape[1] + self.key_value_weight.shape[1]
        std = math.sqrt(2.0 / (self.dim + width))
        for parameter in (self.query_weight, self.key_value_weight):
            nn.init.normal_(parameter, std=std, generator=generator)
        for parameter in (self.out_weight, self.ffn_up, self.ffn_down):
            nn.init.xavier_normal_(parameter, generator=generator)
        for parameter in (self.query_bias, self.key_value_bias, self.out_bias, self.ffn_up_bias, self.ffn_down_bias):
            nn.init.zeros_(parameter)

    def products_per_pair(self) -> int:
        return self.num_heads * (self.qk_dim + self.v_dim)

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        norm, normed = self.options.norm, x_td
        if norm != "post":
            normed = self._norm(x_td)
        q = _linear(normed, self.query_weight, self.query_bias)
        k, v = norm_linear_pieces(
            x_td if norm == "published" else normed,
            self.key_value_weight,
            self.key_value_bias,
            widths=[self.num_heads * self.qk_dim, self.num_heads * self.v_dim],
            norm="none",
            activation="none",
        )
        attended = softmax_attention(
            self.split_heads(q, self.qk_dim),
            self.split_heads(k, self.qk_dim),
            self.split_heads(v, self.v_dim),
            tokens.offsets,
            scale=1.0 / math.sqrt(self.qk_dim),
            max_len=self.max_len,
            visible=tokens.visible,
        )
        residual = x_td if norm == "pre" else normed
        mixed = residual + self._drop(_linear(attended.flatten(1), self.out_weight, self.out_bias), tokens, 0)
        inner = self._norm(mixed)
        if norm != "pre":
            mixed = inner
        activate = F.gelu if self.options.activation == "gelu" else F.relu
        hidden = self._drop(activate(_linear(inner, self.ffn_up, self.ffn_up_bias)), tokens, 1)
        out = mixed + self._drop(_linear(hidden, self.ffn_down, self.ffn_down_bias), tokens, 2)
        return self._norm(out) if norm == "post" else out

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), eps=_EPS)

    def _drop(self, x: Tensor, tokens: Tokens, number: int) -> Tensor:
        return keyed_dropout(x, tokens.dropout(self.dropout, self.site + number), tokens.keys)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return norm_linear(x, weight, bias, norm="none", activation="none")
