"""Causal softmax attention over jagged sequences, the attention of a Transformer decoder."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import native, registry
from turbogr.ops.checks import check_offsets
from turbogr.ops.jagged_attention import _check_qkv, cpu_softmax, reference


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, scale: float, max_len: int | None = None
) -> Tensor:
    """Return sum_j softmax_j(scale · q_i · k_j) · v_j over j <= i, [T, h, e].

    Raises:
        ValueError: shapes or offsets that do not fit together, or a sequence longer than `max_len` where it is given.
    """
    _check_qkv(q, k, v)
    check_offsets(offsets, q.shape[0], max_len)
    function = registry.choose("softmax_attention", q.device, q.dtype)
    out: Tensor = function(q, k, v, offsets, scale)
    return out


registry.register_reference("softmax_attention", reference.softmax_attention)
registry.register("softmax_attention", registry.Backend("cpu", cpu_softmax.softmax_attention, native.why_not))
