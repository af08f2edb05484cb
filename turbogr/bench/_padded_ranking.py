"""The public ranking model in plain PyTorch: padded throughout, or padded in its attention alone, as its own code is.

Both compute what `PublicRankingModel` does, from the same parameters; see `bench/ranking.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.jagged import Jagged
from turbogr.layers.stu import STUBlock
from turbogr.layers.tokens import Tokens
from turbogr.models.public_ranking_model import PublicInput, PublicOutput, PublicRankingModel

_EPS = 1e-6
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_stu(block: STUBlock, x: Tensor, attend: Attend) -> Tensor:
    """Return the output of an STU block for [..., D] in plain PyTorch; `attend` takes q, k, v [..., h, d]."""
    normal = F.layer_norm(x, x.shape[-1:], block.input_norm_weight, block.input_norm_bias, _EPS)
    u, v, q, k = torch.split(normal @ block.uvqk + block.uvqk_bias, block.widths, dim=-1)
    u = F.silu(u)
    heads = (block.num_heads, -1)
    o = attend(*(part.unflatten(-1, heads) for part in (q, k, v))).flatten(-2)
    y = u * F.layer_norm(o, o.shape[-1:], block.output_norm_weight, block.output_norm_bias, _EPS)
    return x + torch.cat([u, o, y], dim=-1) @ block.out_weight


def padded_attention(block: STUBlock, mask: Tensor) -> Attend:
    """Return attention of [B, N, h, d] under `mask` [B, N, N], as the public code computes it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * block.qk_dim**-0.5
        scores = F.silu(scores) / block.max_len * mask[:, None]
        return torch.einsum("bhnm,bmhd->bnhd", scores, v)

    return attend


class PlainSTU(nn.Module):
    """A block of the public code's structure: projections and norms of real tokens, attention on padded ones."""

    def __init__(self, block: STUBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        assert tokens.visible is not None
        lengths = tokens.offsets.diff()
        most = int(lengths.max())
        filled = torch.arange(most) < lengths[:, None]
        first, last = (_pad(part, filled) for part in (tokens.visible.first, tokens.visible.last))
        column = torch.arange(most)
        mask = (column >= first[:, :, None]) & (column < last[:, :, None]) | torch.eye(most, dtype=torch.bool)
        attend = padded_attention(self.block, mask & filled[:, None, :])
        return plain_stu(self.block, x_td, lambda *qkv: attend(*(_pad(part, filled) for part in qkv))[filled])


def with_plain_blocks(model: PublicRankingModel) -> PublicRankingModel:
    """Return the model with its blocks replaced by plain ones of the same parameters."""
    model.blocks = nn.ModuleList(PlainSTU(block) for block in model.blocks if isinstance(block, STUBlock))
    return model


class PaddedRankingModel(nn.Module):
    """The same model on padded batches throughout. Every contextual feature has one value, every user as many
    candidates."""

    def __init__(self, model: PublicRankingModel) -> None:
        super().__init__()
        self.own = model

    def forward(self, given: PublicInput) -> PublicOutput:
        """`vectors` of the history are padded, [B · longest history, D_t]; the features are not."""
        own, sizes = self.own, self.own.sizes
        lengths = given.features["item_id"].lengths
        num_users, longest = len(lengths), int(lengths.max())
        filled = torch.arange(longest) < lengths[:, None]
        padded = {name: _padded_values(given.features[name], filled) for name in _OF_HISTORY}
        features = {**given.features, **padded}
        shown = PublicInput(features, given.vectors)
        x = own._tokens(shown)
        history = x[: num_users * longest].unflatten(0, (num_users, longest))
        candidates = x[num_users * longest :].unflatten(0, (num_users, -1))
        slots = own._slots(PublicInput(given.features, given.vectors))
        x = torch.cat([slots, history, candidates], dim=1) * math.sqrt(sizes.dim)
        x = x + self._places(lengths, longest, candidates.shape[1], given, padded["action_time"])
        mask = self._mask(lengths, longest, candidates.shape[1])
        for block in own.blocks:
            assert isinstance(block, STUBlock)
            x = plain_stu(block, x, padded_attention(block, mask))
        seen = x[:, -candidates.shape[1] :].flatten(0, 1)
        users = own._finish(seen, given.features["query_time"].values)
        items = own.item(torch.cat([given.vectors[name] for name in sizes.item_features], dim=1))
        logits = own.head(users * items).T
        return PublicOutput(users, items, own._predictions(logits), own._losses(logits, given))

    def _places(self, lengths: Tensor, longest: int, num_candidates: int, given: PublicInput, times: Jagged) -> Tensor:
        """Return the vectors of positions, counted backwards, and ages of all tokens, [B, N, D]."""
        sizes, slots = self.own.sizes, self.own.sizes.num_slots
        end = (slots + lengths)[:, None]
        place = torch.cat(
            [torch.arange(slots + longest).expand(len(lengths), -1), end.expand(-1, num_candidates)], dim=1
        )
        backwards = ((end - place).clamp(min=0) + slots).clamp(max=sizes.num_positions - 1)
        position = torch.where(torch.arange(place.shape[1]) < slots, place, backwards)
        asked = given.features["query_time"].values.unflatten(0, (len(lengths), -1))
        times_bn = torch.cat([torch.zeros(len(lengths), slots), times.values.unflatten(0, (-1, longest)), asked], 1)
        age = (asked[:, -1:] - times_bn.to(torch.int64)).to(torch.float32).clamp(min=1e-6)
        largest = (sizes.dim if sizes.time_clamp == "columns" else sizes.num_time_buckets) - 1
        bucket = torch.sqrt(age / 60).floor().clamp(0, largest).to(torch.int64)
        return self.own.position[position] + self.own.time[bucket]

    def _mask(self, lengths: Tensor, longest: int, num_candidates: int) -> Tensor:
        slots = self.own.sizes.num_slots
        end = (slots + lengths)[:, None]
        order = torch.cat([torch.arange(slots + longest).expand(len(lengths), -1), end.expand(-1, num_candidates)], 1)
        real = torch.ones_like(order, dtype=torch.bool)
        real[:, : slots + longest] = torch.arange(slots + longest) < end
        mask = (order[:, :, None] > order[:, None, :]) | torch.eye(order.shape[1], dtype=torch.bool)
        return mask & real[:, None, :]


_OF_HISTORY = ("action_weight", "action_time")


def pad_history(values: Tensor, lengths: Tensor) -> Tensor:
    """Return jagged rows of histories as padded ones, [B · longest, ...], 0 behind the end of each."""
    filled = torch.arange(int(lengths.max())) < lengths[:, None]
    return _pad(values, filled).flatten(0, 1)


def _padded_values(feature: Jagged, filled: Tensor) -> Jagged:
    lengths = torch.full((filled.shape[0],), filled.shape[1], dtype=torch.int64)
    return Jagged.from_lengths(_pad(feature.values, filled).flatten(), lengths)


def _pad(x: Tensor, filled: Tensor) -> Tensor:
    out = x.new_zeros(*filled.shape, *x.shape[1:])
    out[filled] = x
    return out


def parameters_of(model: nn.Module) -> Sequence[nn.Parameter]:
    return list(model.parameters())
