"""HSTU attention as Meta's research code computes it: padded batches, a bias for every pair of positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged_attention.reference import BUCKET_WIDTH


def padded_hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
) -> Tensor:
    """Return HSTU attention of jagged [T, h, d], computed on padded [B, max_len, h, d] in plain PyTorch."""
    lengths = offsets.diff()
    filled = torch.arange(max_len)[None, :] < lengths[:, None]
    q_bnhd, k_bnhd, v_bnhe = (pad(x, filled) for x in (q, k, v))
    position = torch.arange(max_len)
    by_position = position_weight[max_len - 1 + position[None, :] - position[:, None]]
    distance = (pad(query_times, filled)[:, :, None] - pad(key_times, filled)[:, None, :]).abs().clamp(min=1)
    buckets = (torch.log(distance.float()) / BUCKET_WIDTH).long().clamp(max=time_weight.numel() - 1)
    bias = by_position[None] + time_weight[buckets]
    scores = torch.einsum("bnhd,bmhd->bhnm", q_bnhd, k_bnhd) + bias[:, None]
    scores = F.silu(scores) / max_len
    causal = torch.ones(max_len, max_len).tril()
    out = torch.einsum("bhnm,bmhe->bnhe", scores * causal, v_bnhe)
    return out[filled]


def pad(x: Tensor, filled: Tensor) -> Tensor:
    """Return jagged [T, ...] as padded [B, n, ...], zeros where `filled` [B, n] is false."""
    out = x.new_zeros(*filled.shape, *x.shape[1:])
    out[filled] = x
    return out
