"""Causal attention over jagged sequences: HSTU's SiLU attention with relative bias, FuXi's channels, and softmax.

Shape legend: T tokens, h heads, d the size of a head of q and k, e the size of a head of v, B sequences.
All kinds share the layout: q, k `[T, h, d]`, v `[T, h, e]` (rows may be strided, the last two dims contiguous per row),
`offsets [B + 1]`; a token attends to itself and to the tokens before it in its own sequence. README.md has the maths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops import native, registry
from turbogr.ops.checks import check_dtypes, check_filled, check_offsets, check_shape
from turbogr.ops.jagged_attention import cpu_relative, reference

BUCKET_WIDTH = reference.BUCKET_WIDTH
MAX_TIME_WEIGHTS = 2**16


class RelativeBias(NamedTuple):
    """What the bias between a query and a key is made of.

    `query_times` [T] is the time of the item that each position predicts, `key_times` [T] the time of each position's
    own item (int64 seconds). `position_weight` [2 * max_len - 1], `time_weight` [num_buckets + 1].
    """

    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    time_weight: Tensor


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: RelativeBias, *, max_len: int) -> Tensor:
    """Return sum_j SiLU(q_i · k_j + bias_ij) / max_len · v_j over j <= i, [T, h, e].

    Raises:
        ValueError: shapes or offsets that do not fit together, or a sequence longer than `max_len`.
    """
    _check_qkv(q, k, v)
    check_offsets(offsets, q.shape[0], max_len)
    _check_bias(bias, q, max_len)
    function = registry.choose("hstu_attention", q.device, q.dtype)
    out: Tensor = function(q, k, v, offsets, *bias, max_len)
    return out


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_shape("q", q, (None, None, None))
    check_shape("k", k, tuple(q.shape))
    check_shape("v", v, (q.shape[0], q.shape[1], None))
    check_dtypes(q.dtype, k=k, v=v)
    check_filled("q", q, 1, 2)
    check_filled("v", v, 2)


def _check_bias(bias: RelativeBias, tokens: Tensor, max_len: int) -> None:
    for name, times in (("query_times", bias.query_times), ("key_times", bias.key_times)):
        check_shape(name, times, (tokens.shape[0],))
        if times.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 seconds, got {times.dtype}")
    check_shape("position_weight", bias.position_weight, (2 * max_len - 1,))
    check_shape("time_weight", bias.time_weight, (None,))
    check_dtypes(tokens.dtype, position_weight=bias.position_weight, time_weight=bias.time_weight)
    if not 0 < bias.time_weight.numel() <= MAX_TIME_WEIGHTS:
        raise ValueError(f"time_weight needs 1 to {MAX_TIME_WEIGHTS} entries, got {bias.time_weight.numel()}")


registry.register_reference("hstu_attention", reference.hstu_attention)
registry.register("hstu_attention", registry.Backend("cpu", cpu_relative.hstu_attention, native.why_not))
