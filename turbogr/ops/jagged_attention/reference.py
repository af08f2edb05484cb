"""The definition of jagged attention in plain PyTorch, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged_attention.masks import KeyRanges
from turbogr.ops.registry import REFERENCE
from turbogr.streams import host_ints

BACKEND = REFERENCE

BUCKET_WIDTH = 0.301
DECAY_UNIT = 86_400.0  # seconds
TABLE, DAYS, INVERSE_POWER, SECONDS = FORMS = ("table", "days", "inverse-power", "seconds")
"""What FuXi's time channel is: a table over buckets, or a function of the distance; the kernels know their places."""
_BEYOND_INT64 = 44.0  # exp of it exceeds every int64; that of some thousand buckets would exceed every float


@lru_cache
def bucket_boundaries(num_buckets: int) -> Tensor:
    """First distance of buckets 1 to `num_buckets`: bucket b holds distances from exp(0.301 b), in whole seconds.

    Integers make the bucket of a distance exact and the same in every backend; entries beyond int64 are its maximum.
    """
    return torch.tensor(bucket_limits(num_buckets), dtype=torch.int64)


def bucket_limits(num_buckets: int) -> list[int]:
    """The numbers of `bucket_boundaries`."""
    limit = torch.iinfo(torch.int64).max
    edges = [math.exp(min(BUCKET_WIDTH * b, _BEYOND_INT64)) for b in range(1, num_buckets + 1)]
    return [min(math.ceil(edge), limit) for edge in edges]


@lru_cache
def _boundaries_on(device: torch.device, num_buckets: int) -> Tensor:
    return bucket_boundaries(num_buckets).to(device)


def time_buckets(query_times: Tensor, key_times: Tensor, num_buckets: int) -> Tensor:
    """Bucket of every pair: floor(ln(max(1, |difference|)) / 0.301), at most `num_buckets`; [queries, keys] int64."""
    distance = (query_times[:, None] - key_times[None, :]).abs()
    return torch.bucketize(distance, _boundaries_on(distance.device, num_buckets), right=True)


def relative_bias(
    query_times: Tensor, key_times: Tensor, position_weight: Tensor, time_weight: Tensor, max_len: int
) -> Tensor:
    """Bias of one sequence of n: [n, n]."""
    return position_weights(query_times.shape[0], position_weight, max_len) + bucket_weights(
        query_times, key_times, time_weight
    )


def position_weights(n: int, position_weight: Tensor, max_len: int) -> Tensor:
    """Weight of every pair of positions by their distance, [n, n]."""
    place = torch.arange(n, device=position_weight.device)
    return _look_up(position_weight, max_len - 1 + place[None, :] - place[:, None])


def bucket_weights(query_times: Tensor, key_times: Tensor, time_weight: Tensor) -> Tensor:
    """Weight of every pair by the bucket of its distance in time, [queries, keys]."""
    return _look_up(time_weight, time_buckets(query_times, key_times, time_weight.numel() - 1))


def decay_weights(query_times: Tensor, key_times: Tensor, decay: Tensor) -> Tensor:
    """Weight a · γ^(x^β) of every pair, x = (1 + |difference|) in days, from `decay` = (a, β, γ); [queries, keys]."""
    seconds = 1 + (query_times[:, None] - key_times[None, :]).abs()
    log_days = torch.log(seconds.to(decay.dtype) / DECAY_UNIT)
    amplitude, exponent, base = decay.unbind()
    return amplitude * torch.exp(torch.log(base) * torch.exp(exponent * log_days))


def inverse_power_weights(query_times: Tensor, key_times: Tensor, power: Tensor) -> Tensor:
    """Weight a · x^(-b) of every pair, x = 1 + max(difference, 0) in seconds, from `power` = (a, b)."""
    seconds = 1 + (query_times[:, None] - key_times[None, :]).clamp(min=0)
    amplitude, exponent = power.unbind()
    return amplitude * torch.exp(-exponent * torch.log(seconds.to(power.dtype)))


def seconds_decay_weights(query_times: Tensor, key_times: Tensor, decay: Tensor) -> Tensor:
    """Weight a · γ^(x^β) of every pair, x = |difference| in seconds and 0^β = 0, from `decay` = (a, β, γ)."""
    seconds = (query_times[:, None] - key_times[None, :]).abs()
    amplitude, exponent, base = decay.unbind()
    power = torch.exp(exponent * torch.log(seconds.clamp(min=1).to(decay.dtype))) * (seconds > 0)
    return amplitude * torch.exp(torch.log(base) * power)


def _look_up(weight: Tensor, index: Tensor) -> Tensor:
    """weight[index], with a gradient that adds up in a fixed order (plain indexing's depends on the threads)."""
    return weight.index_select(0, index.flatten()).view(index.shape)


def visible_pairs(visible: KeyRanges, row: slice) -> Tensor:
    """Which keys the queries of one sequence of n see, [n, n] bool."""
    first, last = (ends[row, None] for ends in visible)
    position = torch.arange(row.stop - row.start, device=first.device)
    return ((position >= first) & (position < last)) | (position == position[:, None])


def _keep_visible(weights: Tensor, visible: KeyRanges | None, row: slice) -> Tensor:
    """The weights [..., n, n] of one sequence with zeros where a query does not see the key."""
    return torch.tril(weights) if visible is None else torch.where(visible_pairs(visible, row), weights, 0)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    position_weight: Tensor | None,
    time_weight: Tensor | None,
    max_len: int,
    alpha: float,
) -> Tensor:
    """See `turbogr.ops.jagged_attention.hstu_attention`."""
    rows = []
    if alpha != 1.0:
        q = alpha * q
    for start, stop in pairwise(host_ints(offsets)):
        row = slice(start, stop)
        q_hnd, k_hnd, v_hne = (x[row].transpose(0, 1) for x in (q, k, v))
        scores = q_hnd @ k_hnd.transpose(1, 2)
        if query_times is not None:
            assert key_times is not None and position_weight is not None and time_weight is not None
            scores = scores + relative_bias(query_times[row], key_times[row], position_weight, time_weight, max_len)
        rows.append((_keep_visible(F.silu(scores) / max_len, visible, row) @ v_hne).transpose(0, 1))
    return torch.cat(rows) if rows else v.new_zeros(v.shape)


def fuxi_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    functional: bool,
) -> Tensor:
    """See `turbogr.ops.jagged_attention.fuxi.fuxi_attention`; `time_weight` is the decay (a, β, γ) if `functional`."""
    bias = query_times, key_times, position_weight, time_weight
    return _channels(q, k, v, offsets, visible, *bias, max_len, decay_weights if functional else bucket_weights)


def fuxi_seconds_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    form: str,
) -> Tensor:
    """The same with a function of seconds, whose parameters `time_weight` holds."""
    weigh = {INVERSE_POWER: inverse_power_weights, SECONDS: seconds_decay_weights}[form]
    bias = query_times, key_times, position_weight, time_weight
    return _channels(q, k, v, offsets, visible, *bias, max_len, weigh)


def _channels(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    rows = []
    for start, stop in pairwise(host_ints(offsets)):
        row = slice(start, stop)
        v_hne = v[row].transpose(0, 1)
        weights = [
            position_weights(stop - start, position_weight, max_len),
            weigh(query_times[row], key_times[row], time_weight),
        ]
        if q is not None and k is not None:
            q_hnd, k_hnd = (x[row].transpose(0, 1) for x in (q, k))
            weights.append(F.silu(q_hnd @ k_hnd.transpose(1, 2)) / max_len)
        channels = [_keep_visible(channel, visible, row) @ v_hne for channel in weights]
        rows.append(torch.cat(channels, dim=2).transpose(0, 1))
    num_channels = 2 if q is None else 3
    return torch.cat(rows) if rows else v.new_zeros(0, v.shape[1], num_channels * v.shape[2])


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, visible: KeyRanges | None, scale: float
) -> Tensor:
    """See `turbogr.ops.jagged_attention.softmax.softmax_attention`."""
    rows = []
    for start, stop in pairwise(host_ints(offsets)):
        row = slice(start, stop)
        q_hnd, k_hnd, v_hne = (x[row].transpose(0, 1) for x in (q, k, v))
        if visible is None:
            hidden = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
        else:
            hidden = ~visible_pairs(visible, row)
        scores = (scale * q_hnd @ k_hnd.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        rows.append((torch.softmax(scores, dim=2) @ v_hne).transpose(0, 1))
    return torch.cat(rows) if rows else v.new_zeros(v.shape)
