"""The definition of jagged attention in plain PyTorch, one sequence at a time."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

BUCKET_WIDTH = 0.301


@lru_cache
def bucket_boundaries(num_buckets: int) -> Tensor:
    """First distance of buckets 1 to `num_buckets`: bucket b holds distances from exp(0.301 b), in whole seconds.

    Integers make the bucket of a distance exact and the same in every backend; entries beyond int64 are its maximum.
    """
    limit = torch.iinfo(torch.int64).max
    edges = [math.exp(BUCKET_WIDTH * b) for b in range(1, num_buckets + 1)]
    return torch.tensor([min(math.ceil(edge), limit) for edge in edges], dtype=torch.int64)


def time_buckets(query_times: Tensor, key_times: Tensor, num_buckets: int) -> Tensor:
    """Bucket of every pair: floor(ln(max(1, |difference|)) / 0.301), at most `num_buckets`; [queries, keys] int64."""
    distance = (query_times[:, None] - key_times[None, :]).abs()
    boundaries = bucket_boundaries(num_buckets).to(distance.device)
    return torch.bucketize(distance, boundaries, right=True)


def relative_bias(
    query_times: Tensor, key_times: Tensor, position_weight: Tensor, time_weight: Tensor, max_len: int
) -> Tensor:
    """Bias of one sequence of n: [n, n]."""
    n = query_times.shape[0]
    place = torch.arange(n, device=query_times.device)
    by_position = _look_up(position_weight, max_len - 1 + place[None, :] - place[:, None])
    return by_position + _look_up(time_weight, time_buckets(query_times, key_times, time_weight.numel() - 1))


def _look_up(weight: Tensor, index: Tensor) -> Tensor:
    """weight[index], with a gradient that adds up in a fixed order (plain indexing's depends on the threads)."""
    return weight.index_select(0, index.flatten()).view(index.shape)


def hstu_attention(
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
    """See `turbogr.ops.jagged_attention.hstu_attention`."""
    rows = []
    bounds = offsets.tolist()
    for start, stop in pairwise(bounds):
        row = slice(start, stop)
        bias = relative_bias(query_times[row], key_times[row], position_weight, time_weight, max_len)
        q_hnd, k_hnd, v_hne = (x[row].transpose(0, 1) for x in (q, k, v))
        scores = torch.tril(F.silu(q_hnd @ k_hnd.transpose(1, 2) + bias) / max_len)
        rows.append((scores @ v_hne).transpose(0, 1))
    return torch.cat(rows) if rows else v.new_zeros(v.shape)
