"""Attention over sequences that are padded to one length, in operators that other runtimes have.

The same arguments and results as the reference, for B sequences of N tokens each, the last ones padding: T = B · N, and
only the number of `offsets` is read. Padding comes last, so no real token sees it. There is no loop over sequences and
no value is read while the graph is made, so it can be exported. Times and buckets stay exact integers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged_attention.masks import KeyRanges
from turbogr.ops.jagged_attention.reference import (
    BUCKET_WIDTH,
    DECAY_UNIT,
    INVERSE_POWER,
    SECONDS,
    bucket_limits,
)


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
    """See the reference."""
    q_bhnd, k_bhnd, v_bhne = (_heads_first(x, offsets) for x in (q, k, v))
    scores = (q_bhnd if alpha == 1.0 else alpha * q_bhnd) @ k_bhnd.transpose(2, 3)
    if query_times is not None:
        assert key_times is not None and position_weight is not None and time_weight is not None
        times = bucket_weights(query_times, key_times, offsets, time_weight)
        scores = scores + (_position_weights(scores.shape[2], position_weight, max_len) + times)[:, None]
    weights = _keep_visible(F.silu(scores) / max_len, visible, offsets)
    return _tokens_first(weights @ v_bhne)


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
    """See the reference."""
    weigh = _decay_weights if functional else bucket_weights
    weights = weigh(query_times, key_times, offsets, time_weight)
    return _channels(q, k, v, offsets, visible, weights, position_weight, max_len)


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
    """See the reference."""
    weigh = {INVERSE_POWER: _inverse_power_weights, SECONDS: _seconds_decay_weights}[form]
    weights = weigh(query_times, key_times, offsets, time_weight)
    return _channels(q, k, v, offsets, visible, weights, position_weight, max_len)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, visible: KeyRanges | None, scale: float
) -> Tensor:
    """See the reference."""
    q_bhnd, k_bhnd, v_bhne = (_heads_first(x, offsets) for x in (q, k, v))
    scores = scale * q_bhnd @ k_bhnd.transpose(2, 3)
    seen = visible_pairs(scores.shape[2], visible, offsets)
    scores = torch.where(seen, scores, torch.full((), float("-inf"), dtype=scores.dtype, device=scores.device))
    return _tokens_first(torch.softmax(scores, dim=3) @ v_bhne)


def _channels(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    time_weights: Tensor,
    position_weight: Tensor,
    max_len: int,
) -> Tensor:
    """FuXi's channels side by side, from the weights of times [B, N, N]."""
    v_bhne = _heads_first(v, offsets)
    weights = [_position_weights(v_bhne.shape[2], position_weight, max_len)[None, None], time_weights[:, None]]
    if q is not None and k is not None:
        q_bhnd, k_bhnd = _heads_first(q, offsets), _heads_first(k, offsets)
        weights.append(F.silu(q_bhnd @ k_bhnd.transpose(2, 3)) / max_len)
    channels = [_keep_visible(channel, visible, offsets) @ v_bhne for channel in weights]
    return _tokens_first(torch.cat(channels, dim=3))


def bucket_weights(query_times: Tensor, key_times: Tensor, offsets: Tensor, time_weight: Tensor) -> Tensor:
    """Weight of every pair by the bucket of its distance in time, [B, N, N].

    The bucket is guessed by a logarithm in float64, which is wrong by one at most, and corrected by the exact limits.
    """
    num_buckets = time_weight.numel() - 1
    limits, most = bucket_limits(num_buckets), torch.iinfo(torch.int64).max
    low, high = (
        torch.tensor(ends, dtype=torch.int64, device=time_weight.device) for ends in ([-1, *limits], [*limits, most])
    )
    distance = _distances(query_times, key_times, offsets)
    guess = (torch.log(distance.clamp(min=1).to(torch.float64)) / BUCKET_WIDTH).to(torch.int64).clamp(max=num_buckets)
    bucket = guess + (distance >= F.embedding(guess, high[:, None])[..., 0]).to(torch.int64)
    bucket = bucket - (distance < F.embedding(guess, low[:, None])[..., 0]).to(torch.int64)
    return F.embedding(bucket, time_weight[:, None])[..., 0]


def visible_pairs(n: int, visible: KeyRanges | None, offsets: Tensor) -> Tensor:
    """Which keys every query sees, [1 or B, 1, N, N] bool."""
    place = torch.arange(n, device=offsets.device)
    if visible is None:
        return (place[None, :] <= place[:, None])[None, None]
    first, last = (_by_sequence(ends, offsets)[:, :, None] for ends in visible)
    return (((place >= first) & (place < last)) | (place[None, :] == place[:, None]))[:, None]


def _keep_visible(weights: Tensor, visible: KeyRanges | None, offsets: Tensor) -> Tensor:
    return torch.where(visible_pairs(weights.shape[-1], visible, offsets), weights, torch.zeros_like(weights))


def _position_weights(n: int, position_weight: Tensor, max_len: int) -> Tensor:
    """Weight of every pair of positions by their distance, [N, N]."""
    place = torch.arange(n, device=position_weight.device)
    return F.embedding(max_len - 1 + place[None, :] - place[:, None], position_weight[:, None])[..., 0]


def _decay_weights(query_times: Tensor, key_times: Tensor, offsets: Tensor, decay: Tensor) -> Tensor:
    """Weight a · γ^(x^β) of every pair, [B, N, N]."""
    seconds = 1 + _distances(query_times, key_times, offsets)
    log_days = torch.log(seconds.to(decay.dtype) / DECAY_UNIT)
    amplitude, exponent, base = decay.unbind()
    return amplitude * torch.exp(torch.log(base) * torch.exp(exponent * log_days))


def _inverse_power_weights(query_times: Tensor, key_times: Tensor, offsets: Tensor, power: Tensor) -> Tensor:
    """Weight a · x^(-b) of every pair, [B, N, N]."""
    queries, keys = _by_sequence(query_times, offsets), _by_sequence(key_times, offsets)
    seconds = 1 + (queries[:, :, None] - keys[:, None, :]).clamp(min=0)
    amplitude, exponent = power.unbind()
    return amplitude * torch.exp(-exponent * torch.log(seconds.to(power.dtype)))


def _seconds_decay_weights(query_times: Tensor, key_times: Tensor, offsets: Tensor, decay: Tensor) -> Tensor:
    """Weight a · γ^(x^β) of every pair by seconds, [B, N, N]."""
    seconds = _distances(query_times, key_times, offsets)
    amplitude, exponent, base = decay.unbind()
    power = torch.exp(exponent * torch.log(seconds.clamp(min=1).to(decay.dtype))) * (seconds > 0).to(decay.dtype)
    return amplitude * torch.exp(torch.log(base) * power)


def _distances(query_times: Tensor, key_times: Tensor, offsets: Tensor) -> Tensor:
    """Seconds between the query's and the key's time, [B, N, N] int64."""
    return (_by_sequence(query_times, offsets)[:, :, None] - _by_sequence(key_times, offsets)[:, None, :]).abs()


def _by_sequence(values: Tensor, offsets: Tensor) -> Tensor:
    """View [T] as [B, N]."""
    return values.view(offsets.shape[0] - 1, -1)


def _heads_first(x: Tensor, offsets: Tensor) -> Tensor:
    """[T, h, d] -> [B, h, N, d]."""
    return x.reshape(offsets.shape[0] - 1, -1, x.shape[1], x.shape[2]).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """[B, h, N, e] -> [T, h, e]."""
    return x.transpose(1, 2).flatten(0, 1)
