"""Attention over jagged sequences: HSTU's SiLU attention with relative bias, FuXi's channels, and softmax.

Shape legend: T tokens, h heads, d the size of a head of q and k, e the size of a head of v, B sequences.
All kinds share the layout: q, k `[T, h, d]`, v `[T, h, e]` (rows may be strided, the last two dims contiguous per row),
`offsets [B + 1]`. A token attends to itself and to those tokens of its own sequence that `visible` names; without it to
the tokens before it. README.md has the maths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_dtypes, check_filled, check_offsets, check_parameters, check_shape
from turbogr.ops.jagged_attention import reference
from turbogr.ops.jagged_attention.masks import KeyRanges, check_ranges

BUCKET_WIDTH = reference.BUCKET_WIDTH
MAX_TIME_WEIGHTS = 2**16
_NO_BIAS = (None, None, None, None)


class RelativeBias(NamedTuple):
    """What the bias between a query and a key is made of.

    `query_times` [T] is the time of the item that each position predicts, `key_times` [T] the time of each position's
    own item (int64 seconds). `position_weight` [2 * max_len - 1], `time_weight` [num_buckets + 1].
    """

    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    time_weight: Tensor


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    bias: RelativeBias | None = None,
    *,
    max_len: int,
    visible: KeyRanges | None = None,
    row_scale: Tensor | float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Return s_i · sum_j SiLU(alpha · q_i · k_j + bias_ij) · v_j over the keys j that token i sees, [T, h, e].

    `visible` None means j <= i. s_i is 1 / `max_len`, or `row_scale`: one number, or one per token, [T]. Without `bias`
    there is none.

    Raises:
        ValueError: shapes, offsets or ranges that do not fit together, or a sequence longer than `max_len`.
    """
    _check_qkv(q, k, v)
    check_offsets(offsets, q.shape[0], max_len)
    if bias is not None:
        _check_bias(bias, q, max_len)
    if visible is not None:
        check_ranges(visible, offsets, q.shape[0])
    if isinstance(row_scale, Tensor):
        check_shape("row_scale", row_scale, (q.shape[0],))
        check_parameters(q.dtype, row_scale=row_scale)
    function = registry.choose("hstu_attention", q.device, q.dtype)
    out: Tensor = function(q, k, v, offsets, visible, *(bias or _NO_BIAS), max_len, alpha)
    if row_scale is None:
        return out
    # It is the same for all keys of a row, so it may be applied to their sum.
    ratio = max_len * row_scale
    scaled: Tensor = out * (ratio[:, None, None] if isinstance(ratio, Tensor) else ratio)
    return scaled.to(out.dtype)


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
    check_parameters(tokens.dtype, position_weight=bias.position_weight, time_weight=bias.time_weight)
    if not 0 < bias.time_weight.numel() <= MAX_TIME_WEIGHTS:
        raise ValueError(f"time_weight needs 1 to {MAX_TIME_WEIGHTS} entries, got {bias.time_weight.numel()}")


registry.register_operator("hstu_attention", package=__name__)
