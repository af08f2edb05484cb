"""Inputs of attention for tests: packed, strided q, k and v, and times that rise as a user's do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    time_weight: Tensor
    max_len: int
    grad: Tensor


def make_inputs(
    lengths: list[int], heads: int, d: int, e: int, *, max_len: int | None = None, span: int = 10**7, seed: int = 0
) -> AttentionInputs:
    """Random inputs in fp64; q, k, v are views of one packed matrix, as the models make them."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    max_len = max_len or max([1, *lengths]) + 3

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=random)

    packed = normal(num_tokens, heads * (2 * d + e) + 5)
    q, k, v, _ = packed.split([heads * d, heads * d, heads * e, 5], dim=1)
    times = torch.cat([torch.randint(0, span, (n,), generator=random).sort()[0] for n in lengths] or [torch.empty(0)])
    times = times.to(torch.int64)
    following = [torch.cat([row[1:], row[-1:] + 3600]) for row in times.split(lengths)] if lengths else [times]
    return AttentionInputs(
        q.view(num_tokens, heads, d),
        k.view(num_tokens, heads, d),
        v.view(num_tokens, heads, e),
        torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]),
        torch.cat(following),
        times,
        0.3 * normal(2 * max_len - 1),
        0.3 * normal(33),
        max_len,
        normal(num_tokens, heads, e),
    )
