"""Relative positions: one weight for every distance between two tokens of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def spread_positions(weight: Tensor, max_len: int) -> Tensor:
    """Return the weights of all distances from -(max_len - 1) to max_len - 1, [2 · max_len - 1].

    `weight` [2 · n - 1] covers distances up to n - 1; longer ones take the weight of the longest.
    """
    longest = weight.numel() // 2
    if longest >= max_len - 1:
        return weight
    distances = torch.arange(1 - max_len, max_len, device=weight.device).clamp(-longest, longest)
    return weight.index_select(0, distances + longest)
