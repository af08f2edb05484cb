"""The FuXi blocks (Ye et al., 2025, and successors): attention in separate channels, then a gated feed-forward part.

They differ in the time channel and in whether there is a channel of content. `fuxi` is the one of TurboGR's paper:
alpha's three channels with a decay in place of time buckets.
Shape legend: T tokens, D model width, h heads, d and e the sizes of a head of q/k and of v, c channels.
"""

from __future__ import annotations

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
    InversePowerBias,
    RelativeBias,
    SecondsDecayBias,
    fuxi_attention,
    gated_linear,
    gated_mlp,
    norm_linear_pieces,
)
from turbogr.ops.jagged_attention.fuxi import FuXiBias
from turbogr.plugins import register

_EPS = 1e-6
_START_DECAY = (0.02, 0.25, 0.8)  # a, β, γ: near a flat average; a as large as the other tables' entries

_SMALLEST_BASE, _SMALLEST_EXPONENT = 1e-4, 0.01  # of FuXi-gamma's decay, which no longer is one below them

_NO_BUCKETS = {"num_time_buckets": "table of time buckets"}
_PUBLIC_PREFIX = "_fuxi._attention_layers."
_PUBLIC_NAMES = {
    "uvqk": "_uvqk",
    "position_weight": "_rel_attn_bias._pos_w",
    "out_weight": "_mffn.lin0.weight",
    "out_bias": "_mffn.lin0.bias",
    "ffn_gate": "_mffn.lin1.weight",
    "ffn_down": "_mffn.lin2.weight",
    "ffn_up": "_mffn.lin3.weight",
}


class FuXiBlock(Block):
    """o = x + W_o · dropout(U ⊙ norm(C)) + b, then o + W_2 · (SiLU(W_1 ô) ⊙ W_3 ô) with ô = dropout(norm(o)).

    C holds the channels of every head side by side (position, time, content), U, V, Q, K = SiLU(norm(x)·W), and norm
    is RMSNorm without parameters. Tables serve all heads, and times are distances to the item to be predicted.
    """

    num_sites = 2
    by_content: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, site: int, options: None = None) -> None:
        super().__init__(config, site, options)
        h = self.num_heads
        self.num_channels = 3 if self.by_content else 2
        qk_width = h * self.qk_dim if self.by_content else 0
        self.widths = [self.num_channels * h * self.v_dim, h * self.v_dim, qk_width, qk_width]
        self.uvqk = nn.Parameter(torch.empty(self.dim, sum(self.widths)))
        self.position_weight = nn.Parameter(torch.empty(2 * self.max_distance - 1))
        self.make_time_parameters()
        self.out_weight = nn.Parameter(torch.empty(self.num_channels * h * self.v_dim, self.dim))
        self.out_bias = nn.Parameter(torch.empty(self.dim))
        self.ffn_gate = nn.Parameter(torch.empty(self.dim, self.ffn_dim))
        self.ffn_up = nn.Parameter(torch.empty(self.dim, self.ffn_dim))
        self.ffn_down = nn.Parameter(torch.empty(self.ffn_dim, self.dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for parameter in (self.uvqk, self.position_weight):
            nn.init.normal_(parameter, std=0.02, generator=generator)
        self.reset_time_parameters(generator)
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
            self.bias(tokens, spread_positions(self.position_weight, self.max_len)),
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

    def make_time_parameters(self) -> None:
        """Make the parameters of the time channel."""
        raise NotImplementedError

    def reset_time_parameters(self, generator: torch.Generator) -> None:
        """Draw them."""
        raise NotImplementedError

    def bias(self, tokens: Tokens, position_weight: Tensor) -> FuXiBias:
        """Return what the channels of position and time are made of."""
        raise NotImplementedError


@register("block", "fuxi-alpha")
class FuXiAlphaBlock(FuXiBlock):
    """Bucketed times; position, time and content channels."""

    title = "FuXi-alpha"
    public_names = PublicNames(_PUBLIC_PREFIX, {**_PUBLIC_NAMES, "time_weight": "_rel_attn_bias._ts_w"})

    def make_time_parameters(self) -> None:
        self.time_weight = nn.Parameter(torch.empty(self.num_time_buckets + 1))

    def reset_time_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.time_weight, std=0.02, generator=generator)

    def bias(self, tokens: Tokens, position_weight: Tensor) -> RelativeBias:
        return RelativeBias(tokens.next_times, tokens.times, position_weight, self.time_weight)


@register("block", "fuxi")
class TurboGRFuXiBlock(FuXiBlock):
    """Times by a learned decay a · γ^(x^β), x in days; position, time and content channels."""

    title = "FuXi"
    unused_sizes: ClassVar = _NO_BUCKETS

    def make_time_parameters(self) -> None:
        self.time_weight = nn.Parameter(torch.empty(3))

    def reset_time_parameters(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.time_weight.copy_(free_decay(torch.tensor(_START_DECAY)))

    def bias(self, tokens: Tokens, position_weight: Tensor) -> DecayBias:
        return DecayBias(tokens.next_times, tokens.times, position_weight, constrain_decay(self.time_weight))


@register("block", "fuxi-beta-days")
class FuXiBetaDaysBlock(TurboGRFuXiBlock):
    """`fuxi` without the content channel, so that attention needs no q and k."""

    title = "FuXi-beta in days"
    by_content = False


@register("block", "fuxi-beta")
class FuXiBetaBlock(FuXiBlock):
    """FuXi-beta of its authors: position and time channels, times by a · x^(-b), x = 1 + seconds."""

    title = "FuXi-beta"
    unused_sizes: ClassVar = _NO_BUCKETS
    by_content = False
    public_names = PublicNames(
        _PUBLIC_PREFIX,
        {**_PUBLIC_NAMES, "time_amplitude": "_rel_attn_bias._pow_a", "time_exponent": "_rel_attn_bias._pow_b"},
    )

    def make_time_parameters(self) -> None:
        self.time_amplitude, self.time_exponent = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def reset_time_parameters(self, generator: torch.Generator) -> None:
        nn.init.uniform_(self.time_amplitude, -0.2, 0.2, generator=generator)
        nn.init.uniform_(self.time_exponent, 0.4, 0.8, generator=generator)

    def bias(self, tokens: Tokens, position_weight: Tensor) -> InversePowerBias:
        power = torch.cat([self.time_amplitude, self.time_exponent])
        return InversePowerBias(tokens.next_times, tokens.times, position_weight, power)


@register("block", "fuxi-gamma")
class FuXiGammaBlock(FuXiBlock):
    """FuXi-gamma of its authors: position and time channels, times by α · γ^(x^β), x in seconds.

    The three are free numbers, as in public ports. Where training takes γ out of [0.0001, 1] or β below 0.01, the
    nearest of these is used, and the gradient still moves the number.
    """

    title = "FuXi-gamma"
    unused_sizes: ClassVar = _NO_BUCKETS
    by_content = False
    public_names = PublicNames(
        _PUBLIC_PREFIX,
        {
            **_PUBLIC_NAMES,
            "time_amplitude": "_rel_attn_bias._alpha",
            "time_exponent": "_rel_attn_bias._beta",
            "time_base": "_rel_attn_bias._gamma",
        },
    )

    def make_time_parameters(self) -> None:
        self.time_amplitude, self.time_exponent, self.time_base = (nn.Parameter(torch.empty(1)) for _ in range(3))

    def reset_time_parameters(self, generator: torch.Generator) -> None:
        nn.init.uniform_(self.time_amplitude, -0.1, 0.1, generator=generator)
        nn.init.uniform_(self.time_exponent, 0.5, 2.0, generator=generator)
        nn.init.uniform_(self.time_base, 0.5, 0.99, generator=generator)

    def bias(self, tokens: Tokens, position_weight: Tensor) -> SecondsDecayBias:
        exponent = _hold(self.time_exponent, _SMALLEST_EXPONENT, None)
        decay = torch.cat([self.time_amplitude, exponent, _hold(self.time_base, _SMALLEST_BASE, 1.0)])
        return SecondsDecayBias(tokens.next_times, tokens.times, position_weight, decay)


def _hold(x: Tensor, lowest: float, highest: float | None) -> Tensor:
    """Clamp, with the gradient of x itself."""
    return x + (x.clamp(lowest, highest) - x).detach()


def constrain_decay(free: Tensor) -> Tensor:
    """Map three free numbers to a, β > 0 and γ in (0, 1)."""
    amplitude, exponent, base = free.unbind()
    return torch.stack([amplitude, F.softplus(exponent), torch.sigmoid(base)])


def free_decay(constrained: Tensor) -> Tensor:
    """The numbers that `constrain_decay` maps to these."""
    amplitude, exponent, base = constrained.unbind()
    return torch.stack([amplitude, torch.log(torch.expm1(exponent)), torch.logit(base)])
