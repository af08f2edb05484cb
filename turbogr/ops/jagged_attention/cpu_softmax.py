"""Softmax attention on compiled kernels: a running maximum and sum forward, probabilities again backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_offsets
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.jagged_attention.masks import KeyRanges, check_ranges
from turbogr.ops.native import Kernel, packed_heads, pointer

BACKEND = native.MODEL_BACKEND

_forward_kernel = Kernel(
    "softmax_forward",
    "float *q, *k, *v; int64 *offsets, *first, *last; float *out, *log_sums; "
    "int64 num_sequences, num_tokens, heads, d, e, q_stride, k_stride, v_stride; float scale",
)
_backward_kernel = Kernel(
    "softmax_backward",
    "float *grad_out, *q, *k, *v; int64 *offsets, *first, *last; float *out, *log_sums, *grad_q, *grad_k, *grad_v; "
    "int64 num_sequences, num_tokens, heads, d, e, q_stride, k_stride, v_stride; float scale",
)


class _Inputs(NamedTuple):
    """The arguments of the operator; without `first` and `last` attention is causal."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    first: Tensor | None
    last: Tensor | None
    scale: float


def _empty_outputs(v: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(v.shape[:2], dtype=torch.float32)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch_operator("softmax_attention", outputs="out log_sums", fake=_empty_outputs)
def _forward(inputs: _Inputs) -> tuple[Tensor, Tensor]:
    num_tokens = inputs.q.shape[0]
    check_offsets(inputs.offsets, num_tokens)
    if inputs.first is not None and inputs.last is not None:
        check_ranges(KeyRanges(inputs.first, inputs.last), inputs.offsets, num_tokens)
    tensors, numbers = _kernel_arguments(inputs)
    out, log_sums = _empty_outputs(inputs.v)
    _forward_kernel(*map(pointer, tensors), out.data_ptr(), log_sums.data_ptr(), *numbers)
    return out, log_sums


@torch_operator("softmax_attention_backward", fake=_empty_gradients)
def _backward(grad: Tensor, out: Tensor, log_sums: Tensor, inputs: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    grad, out = grad.contiguous(), out.contiguous()
    tensors, numbers = _kernel_arguments(inputs)
    grads = _empty_gradients(inputs.q, inputs.k, inputs.v)
    results = [out.data_ptr(), log_sums.data_ptr(), *(x.data_ptr() for x in grads)]
    _backward_kernel(grad.data_ptr(), *map(pointer, tensors), *results, *numbers)
    return grads


set_gradient(_forward, _backward, of="q k v")


def _kernel_arguments(inputs: _Inputs) -> tuple[list[Tensor | None], list[float]]:
    """The tensors that a kernel reads (keep them until it has run), and the numbers that come last."""
    q, k, v = (packed_heads(x) for x in inputs[:3])
    ranges = [None if x is None else x.contiguous() for x in (inputs.first, inputs.last)]
    strides = [x.stride(0) for x in (q, k, v)]
    numbers = [inputs.offsets.numel() - 1, *q.shape, v.shape[2], *strides, inputs.scale]
    return [q, k, v, inputs.offsets.contiguous(), *ranges], numbers


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, visible: KeyRanges | None, scale: float
) -> Tensor:
    """See `turbogr.ops.jagged_attention.softmax.softmax_attention`."""
    out: Tensor = _forward(q, k, v, offsets, *(visible or (None, None)), scale)[0]
    return out
