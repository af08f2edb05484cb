"""FuXi's attention: separate channels for position, time and content, each a weighted sum of the same values.

One contract serves the whole family. The time channel is a table over buckets (`RelativeBias`) or a function of the
distance (`DecayBias`, `InversePowerBias`, `SecondsDecayBias`); without q and k there is no content
channel. Position and time weights are the same for all heads, so a kernel computes them once per pair of tokens.
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


class InversePowerBias(NamedTuple):
    """Like `RelativeBias`, with FuXi-beta's function of the distance in place of the table over buckets.

    `power` [2] holds a and b of the weight a · x^(-b), where x = 1 + max(difference, 0) in seconds.
    """

    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    power: Tensor


class SecondsDecayBias(NamedTuple):
    """Like `DecayBias`, with |difference| in seconds as x and 0^β = 0: FuXi-gamma's function."""

    query_times: Tensor
    key_times: Tensor
    position_weight: Tensor
    decay: Tensor


FuXiBias = RelativeBias | DecayBias | InversePowerBias | SecondsDecayBias

_NUM_PARAMETERS = {DecayBias: ("decay", 3), InversePowerBias: ("power", 2), SecondsDecayBias: ("decay", 3)}
_FORMS_IN_SECONDS = {InversePowerBias: reference.INVERSE_POWER, SecondsDecayBias: reference.SECONDS}


def fuxi_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    bias: FuXiBias,
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
    if type(bias) in _NUM_PARAMETERS:
        name, number = _NUM_PARAMETERS[type(bias)]
        check_shape(name, bias[3], (number,))
    _check_bias(RelativeBias(*bias), v, max_len)
    if visible is not None:
        check_ranges(visible, offsets, v.shape[0])
    out: Tensor
    if type(bias) in _FORMS_IN_SECONDS:
        function = registry.choose("fuxi_seconds_attention", v.device, v.dtype)
        out = function(q, k, v, offsets, visible, *bias, max_len, _FORMS_IN_SECONDS[type(bias)])
        return out
    function = registry.choose("fuxi_attention", v.device, v.dtype)
    out = function(q, k, v, offsets, visible, *bias, max_len, isinstance(bias, DecayBias))
    return out


registry.register_operator("fuxi_attention", package=__package__)
registry.register_operator("fuxi_seconds_attention", package=__package__)
