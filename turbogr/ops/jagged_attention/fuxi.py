"""FuXi's attention: separate channels for position, time and content, each a weighted sum of the same values.

One contract serves the whole family. The time channel is a table over buckets (`RelativeBias`) or a decaying function
of the distance (`DecayBias`); without q and k there is no content channel. Position and time weights are the same for
all heads, so a kernel computes them once per pair of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_filled, check_offsets, check_shape
from turbogr.ops.jagged_attention import RelativeBias, _check_bias, _check_qkv, reference
from turbogr.ops.jagged_attention.masks import KeyRanges, check_ranges

DECAY_UNIT = reference.DECAY_UNIT


class DecayBias(NamedTuple):
    """Like `RelativeBias`, with a function of the distance in place of the table over buckets.

    `decay` [3] holds a, β and γ of the weight a · γ^(x^β), where x = (1 + |difference in seconds|) in days: never 0, so
    that every gradient is finite, and of a size that neither underflows nor overflows. β > 0 and 0 < γ < 1 are the
    caller's to keep.
    """

    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    decay: Tensor


def fuxi_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    bias: RelativeBias | DecayBias,
    *,
    max_len: int,
    visible: KeyRanges | None = None,
) -> Tensor:
    """Return the channels of every head side by side, [T, h, c · e]: position, time and, given q and k, content.

    Over the keys j that token i sees (`visible`; None means j <= i) they are
    sum_j position_weight[max_len - 1 + j - i] · v_j, sum_j time_ij · v_j and sum_j SiLU(q_i · k_j) / max_len · v_j.
    c is 3, or 2 when q and k are None.

    Raises:
        ValueError: shapes, offsets or ranges that do not fit together, one of q and k without the other, or a sequence
            longer than `max_len`.
    """
    if (q is None) != (k is None):
        raise ValueError("give both q and k, or neither for attention without the content channel")
    if q is not None and k is not None:
        _check_qkv(q, k, v)
    check_shape("v", v, (None, None, None))
    check_filled("v", v, 1, 2)
    check_offsets(offsets, v.shape[0], max_len)
    functional = isinstance(bias, DecayBias)
    if functional:
        check_shape("decay", bias[3], (3,))
    _check_bias(RelativeBias(*bias), v, max_len)
    if visible is not None:
        check_ranges(visible, offsets, v.shape[0])
    function = registry.choose("fuxi_attention", v.device, v.dtype)
    out: Tensor = function(q, k, v, offsets, visible, *bias, max_len, functional)
    return out


registry.register_operator("fuxi_attention", package=__package__)
