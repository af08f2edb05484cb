"""Linear attention on compiled kernels: retention in chunks, and attention by phase as a recurrence."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_offsets
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import Kernel, packed_heads

BACKEND = native.MODEL_BACKEND

_SHAPE = "int64 num_sequences, heads, d, e, q_stride, k_stride, v_stride"
_PERIODIC = "float *v, *query_turns, *key_turns, *gaps, *log_decay; int64 *offsets"
_PERIODIC_SHAPE = "int64 num_sequences, periods, e, v_stride"

_retention_kernel = Kernel("retention", f"float *q, *k, *v; int64 *offsets; float *decay, *out; {_SHAPE}")
_retention_backward_kernel = Kernel(
    "retention_backward",
    "float *grad_out, *q, *k, *v; int64 *offsets; float *decay, *grad_q, *grad_k, *grad_v, *grad_decay; " + _SHAPE,
)
_periodic_kernel = Kernel("periodic_attention", f"{_PERIODIC}; float *out; {_PERIODIC_SHAPE}")
_periodic_backward_kernel = Kernel(
    "periodic_attention_backward",
    f"float *grad_out, *v, *query_turns, *key_turns, *gaps, *log_decay; int64 *offsets; "
    f"float *grad_v, *grad_log_decay; {_PERIODIC_SHAPE}",
)


def _empty_like_v(v: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@torch_operator("retention", fake=_empty_like_v)
def _retention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, decay: Tensor) -> Tensor:
    check_offsets(offsets, q.shape[0])
    q, k, v, offsets, decay = (
        packed_heads(q),
        packed_heads(k),
        packed_heads(v),
        offsets.contiguous(),
        decay.contiguous(),
    )
    out = _empty_like_v(v)
    _retention_kernel(
        *(x.data_ptr() for x in (q, k, v, offsets, decay, out)),
        offsets.numel() - 1,
        *q.shape[1:],
        v.shape[2],
        *(x.stride(0) for x in (q, k, v)),
    )
    return out


def _empty_retention_gradients(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), decay.new_empty(decay.shape)


@torch_operator("retention_backward", fake=_empty_retention_gradients)
def _retention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, offsets, decay = (
        packed_heads(q),
        packed_heads(k),
        packed_heads(v),
        offsets.contiguous(),
        decay.contiguous(),
    )
    grad, grads = grad.contiguous(), _empty_retention_gradients(q, k, v, decay)
    _retention_backward_kernel(
        *(x.data_ptr() for x in (grad, q, k, v, offsets, decay, *grads)),
        offsets.numel() - 1,
        *q.shape[1:],
        v.shape[2],
        *(x.stride(0) for x in (q, k, v)),
    )
    return grads


set_gradient(_retention, _retention_backward, of="q k v decay")


@torch_operator("periodic_attention", fake=_empty_like_v)
def _periodic(
    v: Tensor, query_turns: Tensor, key_turns: Tensor, gaps: Tensor, log_decay: Tensor, offsets: Tensor
) -> Tensor:
    check_offsets(offsets, v.shape[0])
    v, out = packed_heads(v), _empty_like_v(v)
    others = [x.contiguous() for x in (query_turns, key_turns, gaps, log_decay, offsets)]
    _periodic_kernel(
        *(x.data_ptr() for x in (v, *others, out)), offsets.numel() - 1, gaps.shape[1], v.shape[2], v.stride(0)
    )
    return out


def _empty_periodic_gradients(v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), log_decay.new_empty(log_decay.shape)


@torch_operator("periodic_attention_backward", fake=_empty_periodic_gradients)
def _periodic_backward(
    grad: Tensor,
    v: Tensor,
    query_turns: Tensor,
    key_turns: Tensor,
    gaps: Tensor,
    log_decay: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:
    v, grad, grads = packed_heads(v), grad.contiguous(), _empty_periodic_gradients(v, log_decay)
    others = [x.contiguous() for x in (query_turns, key_turns, gaps, log_decay, offsets)]
    _periodic_backward_kernel(
        *(x.data_ptr() for x in (grad, v, *others, *grads)),
        offsets.numel() - 1,
        gaps.shape[1],
        v.shape[2],
        v.stride(0),
    )
    return grads


set_gradient(_periodic, _periodic_backward, of="v log_decay")


def retention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, decay: Tensor) -> Tensor:
    """See `turbogr.ops.linear_attention.retention`."""
    out: Tensor = _retention(q, k, v, offsets, decay)
    return out


def periodic_attention(
    v: Tensor, query_turns: Tensor, key_turns: Tensor, gaps: Tensor, log_decay: Tensor, offsets: Tensor
) -> Tensor:
    """See `turbogr.ops.linear_attention.periodic_attention`."""
    out: Tensor = _periodic(v, query_turns, key_turns, gaps, log_decay, offsets)
    return out
