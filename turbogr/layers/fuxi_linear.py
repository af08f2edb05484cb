"""The FuXi-Linear block: three channels whose cost grows linearly with the length, then a gated feed-forward part.

It follows its authors' public code: every channel is normalised by itself, and the attention of the temporal channel,
which has no parameters but its decay, is the same in all blocks.
Shape legend: T tokens, D model width, h heads, d and e the sizes of a head of q/k and of v, g periods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.config import ModelConfig
from turbogr.errors import UserError
from turbogr.layers.block import Block, PublicNames
from turbogr.layers.tokens import Tokens
from turbogr.ops import gated_linear, gated_mlp, norm_linear_pieces, periodic_attention, retention
from turbogr.plugins import register

_EPS = 1e-6
_LONGEST_PERIOD = 62  # as a power of 2, in seconds, so that times stay within int64
_MOST_PERIODS = 8  # unless more are set


@dataclass(frozen=True)
class FuXiLinearConfig:
    """Options of the block; the defaults are those of its authors for KuaiRand-27K.

    The temporal channel has `periods` periods of base^(start + stride · g) seconds, g = 0, 1, ...; twice as many must
    divide the width of all heads (unset: the most that do, up to 8). With `learned_decay`
    how fast each forgets is learned, else it halves in 1/(2π) of its period; with `weigh_own` each head weighs what it
    gathers and the token's own value by learned numbers. `position_dim` is the width of the positions' vectors.
    """

    periods: int | None = None
    period_base: int = 2
    period_start: int = 10
    period_stride: int = 3
    learned_decay: bool = True
    weigh_own: bool = True
    position_dim: int = 32

    def check(self) -> None:
        for name in ("periods", "period_stride", "position_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"fuxi-linear.{name} must be positive, got {value}")
        if self.period_base < 2 or self.period_start < 0:
            raise UserError(
                f"fuxi-linear.period_base must be 2 or more and period_start 0 or more, got {self.period_base} and "
                f"{self.period_start}"
            )
        if self.position_dim % 2:
            raise UserError(f"fuxi-linear.position_dim must be even, got {self.position_dim}")
        exponent = self.period_start + self.period_stride * ((self.periods or _MOST_PERIODS) - 1)
        if exponent * math.log2(self.period_base) > _LONGEST_PERIOD:
            raise UserError(
                f"the longest period of fuxi-linear is {self.period_base}^{exponent} seconds, at most "
                f"2^{_LONGEST_PERIOD} are possible; set fuxi-linear.periods, period_base, period_start or "
                "period_stride lower"
            )

    def periods_of(self, width: int) -> int:
        """Return the number of periods in a model whose heads are `width` wide together.

        Raises:
            UserError: they do not divide it.
        """
        fitting = [g for g in range(1, _MOST_PERIODS + 1) if width % (2 * g) == 0]
        if self.periods is None and fitting:
            return fitting[-1]
        if self.periods is None or width % (2 * self.periods):
            wanted = "an even number" if self.periods is None else f"2 · {self.periods} heads, one pair for each period"
            raise UserError(
                f"fuxi-linear divides model.num_heads · model.v_dim, which is {width}, into {wanted}, which does not "
                "go evenly; change one of them or fuxi-linear.periods"
            )
        return self.periods


@register("block", "fuxi-linear", config=FuXiLinearConfig)
class FuXiLinearBlock(Block):
    """o = x + dropout(U ⊙ [norm(R), norm(T), norm(P)]) · W_o, then o + W_2 · (SiLU(W_1 ô) ⊙ W_3 ô), no biases.

    R is retention of Q, K, V, which decays by position; T weighs values by the phase and the decay of times; P by
    products of positions' vectors. U, Q, K, V = SiLU(norm(x)·W). `norm` is LayerNorm without parameters, and RMSNorm
    before the feed-forward part: ô = dropout(norm(o)).
    """

    title = "FuXi-Linear"
    num_sites = 2
    only_causal = True
    unused_sizes: ClassVar = {"num_time_buckets": "table of time buckets"}
    looked_up = ("position_vectors",)
    public_names = PublicNames(
        "_fuxi._attention_layers.",
        {
            "uqkv": "_uvqk",
            "retention_decay": "_retention._gamma",
            "time_decay": "_channel_t._gamma",
            "time_share": "_channel_t.alpha",
            "time_own_share": "_channel_t.beta",
            "time_value": "_channel_t.proj_v.weight",
            "position_vectors": "_channel_p._emb",
            "position_share": "_channel_p._alpha",
            "position_own_share": "_channel_p._beta",
            "position_value": "_channel_p._proj_p.weight",
            "out_weight": "_mffn.lin0.weight",
            "ffn_gate": "_mffn.lin1.weight",
            "ffn_down": "_mffn.lin2.weight",
            "ffn_up": "_mffn.lin3.weight",
        },
    )

    def __init__(self, config: ModelConfig, site: int, options: FuXiLinearConfig | None = None) -> None:
        super().__init__(config, site, options)
        self.options = options = options or FuXiLinearConfig()
        h, dim = self.num_heads, self.dim
        self.width = width = h * self.v_dim
        self.periods = options.periods_of(width)
        self.widths = [3 * width, h * self.qk_dim, h * self.qk_dim, width]
        self.uqkv = nn.Parameter(torch.empty(dim, sum(self.widths)))
        self.retention_decay = nn.Parameter(torch.empty(h))
        self.time_value = nn.Parameter(torch.empty(dim, width))
        if options.weigh_own:
            self.time_share = nn.Parameter(torch.empty(2 * self.periods))
            self.time_own_share = nn.Parameter(torch.empty(2 * self.periods))
        self.position_vectors = nn.Parameter(torch.empty(self.max_len, options.position_dim))
        self.position_share, self.position_own_share = (nn.Parameter(torch.empty(1)) for _ in range(2))
        self.position_value = nn.Parameter(torch.empty(dim, width))
        self.out_weight = nn.Parameter(torch.empty(3 * width, dim))
        self.ffn_gate = nn.Parameter(torch.empty(dim, self.ffn_dim))
        self.ffn_up = nn.Parameter(torch.empty(dim, self.ffn_dim))
        self.ffn_down = nn.Parameter(torch.empty(self.ffn_dim, dim))
        # The first block's; in a tuple, so that it is no submodule of this one.
        self._first: tuple[FuXiLinearBlock, ...] = ()

    def join(self, first: Block) -> None:
        """Take the decay of the temporal channel from the first block, which alone has it."""
        if first is self:
            if self.options.learned_decay:
                self.time_decay = nn.Parameter(torch.empty(self.periods))
        else:
            assert isinstance(first, FuXiLinearBlock)
            self._first = (first,)

    def reset_parameters(self, generator: torch.Generator) -> None:
        for name in ("uqkv", "retention_decay", "time_decay", "time_share", "position_share"):
            if hasattr(self, name):
                nn.init.normal_(getattr(self, name), std=0.02, generator=generator)
        for parameter in (self.out_weight, self.ffn_gate, self.ffn_up, self.ffn_down):
            nn.init.normal_(parameter, std=0.02, generator=generator)
        bound = 1 / math.sqrt(self.dim)
        for parameter in (self.time_value, self.position_value):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        if self.options.weigh_own:
            nn.init.ones_(self.time_own_share)
        nn.init.ones_(self.position_own_share)
        with torch.no_grad():
            self.position_vectors.copy_(_waves(self.max_len, self.options.position_dim))

    def products_per_token(self) -> int:
        """Of the channels as recurrences: every token adds to a state and reads it."""
        retained = self.num_heads * self.qk_dim * self.v_dim
        products: int = 2 * (retained + 2 * self.width + self.options.position_dim * self.width)
        return products

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        if tokens.visible is not None:
            raise UserError(
                "fuxi-linear sees all earlier tokens and has no other masks; set model.mask=causal, and for ranking "
                "choose another model.name, such as hstu or stu"
            )
        u, q, k, v = norm_linear_pieces(x_td, self.uqkv, widths=self.widths, norm="layer", activation="silu", eps=_EPS)
        time_value, position_value = norm_linear_pieces(
            x_td,
            torch.cat([self.time_value, self.position_value], dim=1),
            widths=[self.width, self.width],
            norm="layer",
            activation="none",
            eps=_EPS,
        )
        channels = torch.stack(
            [
                self._retain(q, k, v, tokens),
                self._attend_by_time(time_value, tokens),
                self._attend_by_position(position_value, tokens),
            ],
            dim=1,
        )
        mixed = gated_linear(
            F.layer_norm(channels, (self.width,), eps=_EPS).flatten(1),
            u,
            x_td,
            self.out_weight,
            None,
            norm="none",
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

    def _retain(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        decay = torch.exp(-F.softplus(self.retention_decay).cumsum(0))  # later heads decay more slowly
        parts = self.split_heads(q, self.qk_dim), self.split_heads(k, self.qk_dim), self.split_heads(v, self.v_dim)
        return retention(*parts, tokens.offsets, decay).flatten(1)

    def _attend_by_time(self, values: Tensor, tokens: Tokens) -> Tensor:
        first = self._first[0] if self._first else self
        free = getattr(first, "time_decay", None)
        if free is None:
            free = torch.zeros(self.periods, device=values.device, dtype=self.uqkv.dtype)
        turns, gaps = self._turns(tokens, free.dtype)
        heads = values.view(len(values), 2 * self.periods, self.width // (2 * self.periods))
        gathered = periodic_attention(heads, *turns, gaps, F.logsigmoid(free), tokens.offsets)
        if self.options.weigh_own:
            gathered = (
                gathered * _as(self.time_share, values)[:, None] + heads * _as(self.time_own_share, values)[:, None]
            )
        return gathered.flatten(1)

    def _turns(self, tokens: Tokens, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Sine and cosine of the angles of queries and of keys, [T, g, 2], and the angles that pass, [T, g]."""
        device = tokens.times.device
        o = self.options
        periods = [o.period_base ** (o.period_start + o.period_stride * g) for g in range(self.periods)]
        seconds = torch.tensor(periods, device=device)
        speed = 2 * math.pi / seconds.double()

        def turn(times: Tensor) -> Tensor:
            angle = (times[:, None] % seconds) * speed
            return torch.stack([angle.sin(), angle.cos()], dim=2).to(dtype)

        gaps = (tokens.next_times - tokens.times).clamp(min=0)[:, None] * speed
        return (turn(tokens.next_times), turn(tokens.times)), gaps.to(dtype)

    def _attend_by_position(self, values: Tensor, tokens: Tokens) -> Tensor:
        vectors = self.position_vectors.index_select(0, tokens.positions())[:, None].to(values.dtype)
        still = torch.zeros(1, device=values.device, dtype=self.uqkv.dtype)
        gathered = retention(vectors, vectors, values[:, None], tokens.offsets, still).flatten(1)
        share = self.position_share * (2 / self.options.position_dim)
        return gathered * _as(share, values) + values * _as(self.position_own_share, values)


def _as(parameter: Tensor, activations: Tensor) -> Tensor:
    return parameter.to(activations.dtype)


def _waves(num_positions: int, dim: int) -> Tensor:
    """Sines, then cosines, of the positions at dim / 2 speeds, [num_positions, dim]."""
    speed = 10000 ** (-torch.arange(dim // 2) / (dim // 2))
    angle = torch.arange(num_positions)[:, None] * speed
    return torch.cat([angle.sin(), angle.cos()], dim=1)
