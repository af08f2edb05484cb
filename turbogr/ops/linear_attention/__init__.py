"""Attention in time linear in the length, for causal sequences: retention, and attention by the phase of times.

Shape legend: T tokens, h heads, d the size of a head of q and k, e the size of a head of v, g periods, B sequences.
README.md has the maths.
"""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_dtypes, check_filled, check_offsets, check_parameters, check_shape


def retention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, decay: Tensor) -> Tensor:
    """Return sum over j <= i of (q_i · k_j) · exp(-decay · (i - j + 1)) · v_j of every head, [T, h, e].

    q, k [T, h, d], v [T, h, e], offsets [B + 1], decay [h] of 0 or more.

    Raises:
        ValueError: shapes or offsets that do not fit together.
    """
    check_shape("q", q, (None, None, None))
    check_shape("k", k, tuple(q.shape))
    check_shape("v", v, (q.shape[0], q.shape[1], None))
    check_shape("decay", decay, (q.shape[1],))
    check_dtypes(q.dtype, k=k, v=v)
    check_parameters(q.dtype, decay=decay)
    check_filled("q", q, 1, 2)
    check_filled("v", v, 2)
    check_offsets(offsets, q.shape[0])
    out: Tensor = registry.choose("retention", q.device, q.dtype)(q, k, v, offsets, decay)
    return out


def periodic_attention(
    v: Tensor, query_turns: Tensor, key_turns: Tensor, gaps: Tensor, log_decay: Tensor, offsets: Tensor
) -> Tensor:
    """Return sum over j <= i of turn_ij · exp(log_decay · (gap_j + ... + gap_i)) · v_j of every head, [T, 2 g, e].

    turn_ij is the sine of the angle of query i minus that of key j for the first g heads, and the cosine for the other
    g. v [T, 2 g, e]; query_turns and key_turns [T, g, 2] hold sine and cosine of the angles; gaps [T, g] are 0 or more;
    log_decay [g] is 0 or less; offsets [B + 1]. There are gradients of v and log_decay.

    Raises:
        ValueError: shapes or offsets that do not fit together.
    """
    check_shape("gaps", gaps, (v.shape[0], None))
    periods = gaps.shape[1]
    check_shape("v", v, (None, 2 * periods, None))
    check_shape("query_turns", query_turns, (v.shape[0], periods, 2))
    check_shape("key_turns", key_turns, (v.shape[0], periods, 2))
    check_shape("log_decay", log_decay, (periods,))
    check_parameters(v.dtype, log_decay=log_decay, query_turns=query_turns, key_turns=key_turns, gaps=gaps)
    check_filled("v", v, 1, 2)
    check_offsets(offsets, v.shape[0])
    function = registry.choose("periodic_attention", v.device, v.dtype)
    out: Tensor = function(v, query_turns, key_turns, gaps, log_decay, offsets)
    return out


registry.register_operator("retention", package=__name__)
registry.register_operator("periodic_attention", package=__name__)
