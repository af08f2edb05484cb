"""Softmax attention over jagged sequences, the attention of a Transformer."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_offsets
from turbogr.ops.jagged_attention import _check_qkv
from turbogr.ops.jagged_attention.masks import KeyRanges, check_ranges


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    max_len: int | None = None,
    visible: KeyRanges | None = None,
) -> Tensor:
    """Return sum_j softmax_j(scale · q_i · k_j) · v_j over the keys j that token i sees, [T, h, e].

    `visible` None means j <= i. A key that a token does not see has probability 0.

    Raises:
        ValueError: shapes, offsets or ranges that do not fit together, or a sequence longer than `max_len` where it is
            given.
    """
    _check_qkv(q, k, v)
    check_offsets(offsets, q.shape[0], max_len)
    if visible is not None:
        check_ranges(visible, offsets, q.shape[0])
    function = registry.choose("softmax_attention", q.device, q.dtype)
    out: Tensor = function(q, k, v, offsets, visible, scale)
    return out


registry.register_operator("softmax_attention", package=__package__)
