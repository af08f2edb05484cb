"""HSTU's and FuXi's attention on compiled kernels: tiled, with a backward that recomputes the scores.

Both take the same arguments, so one binding serves them: `_Attention` knows the kernels' names and the number of
channels of the output. HSTU is the case of one channel, with content and without a functional time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_offsets
from turbogr.ops.jagged_attention.reference import bucket_boundaries
from turbogr.ops.native import Kernel, packed_heads, pointer

# Sequences up to this length are cut into smaller blocks: see "Tile sizes" in README.md. The criterion is the model's
# longest length, not the batch's, so that a sequence gives the same output whatever it is batched with.
SMALL_BLOCKS_UP_TO = 256

_INPUTS = (
    "Tensor? q, Tensor? k, Tensor v, Tensor offsets, Tensor query_times, Tensor key_times, Tensor position_weight, "
    "Tensor time_weight, int max_len, bool functional"
)


class _Sized:
    """A kernel for blocks of two sizes."""

    def __init__(self, name: str, signature: str) -> None:
        self._large = Kernel(name, signature)
        self._small = Kernel(name, signature, variant="small")

    def for_length(self, max_len: int) -> Kernel:
        return self._small if max_len <= SMALL_BLOCKS_UP_TO else self._large


class _Attention:
    """`torch.ops.turbogr.<name>_attention` and its gradient, on the kernels `<name>_forward` and `<name>_backward`."""

    def __init__(self, name: str, *, channels: int) -> None:
        self._channels = channels  # of the output besides that of content
        self._forward = _Sized(f"{name}_forward", "p" * 10 + "i" * 11)
        self._backward = _Sized(f"{name}_backward", "p" * 15 + "i" * 10)
        native.define(
            f"{name}_attention({_INPUTS}) -> Tensor",
            self._attend,
            self._empty_output,
            backward=self._differentiate,
            setup_context=self._save,
        )
        native.define(
            f"{name}_attention_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
            self._gradients,
            self._empty_gradients,
        )
        self._operator = getattr(torch.ops.turbogr, f"{name}_attention")
        self._backward_operator = getattr(torch.ops.turbogr, f"{name}_attention_backward")

    def __call__(self, q: Tensor | None, k: Tensor | None, *args: Any) -> Tensor:
        out: Tensor = self._operator(q, k, *args)
        return out

    def _attend(self, *inputs: Any) -> Tensor:
        check_offsets(inputs[3], inputs[2].shape[0], inputs[8])
        pointers, (heads, d, e), rest = _arguments(*inputs)
        out = self._empty_output(*inputs)
        num_sequences, *others = rest
        kernel = self._forward.for_length(inputs[8])
        kernel(*map(pointer, pointers), pointer(out), num_sequences, out.shape[0], heads, d, e, *others)
        return out

    def _gradients(self, grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        pointers, shape, rest = _arguments(*inputs)
        grad = grad.contiguous()
        grads = self._empty_gradients(grad, *inputs)
        num_sequences, *others = rest
        kernel = self._backward.for_length(inputs[8])
        kernel(pointer(grad), *map(pointer, pointers), *map(pointer, grads), num_sequences, *shape, *others)
        return grads

    def _empty_output(self, q: Tensor | None, k: Tensor | None, v: Tensor, *_: Any) -> Tensor:
        num_tokens, heads, e = v.shape
        return v.new_empty(num_tokens, heads, (self._channels + (q is not None)) * e)

    def _empty_gradients(self, grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        q, k, v, _, _, _, position_weight, time_weight, _, _ = inputs
        none = v.new_empty(0)
        return tuple(none if x is None else x.new_empty(x.shape) for x in (q, k, v, position_weight, time_weight))

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.max_len, ctx.functional = inputs
        ctx.save_for_backward(*tensors)

    def _differentiate(self, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # once: whoever recomputes them gives them up when they are read
        grad_q, grad_k, grad_v, grad_position_weight, grad_time_weight = self._backward_operator(
            grad, *tensors, ctx.max_len, ctx.functional
        )
        if tensors[0] is None:
            grad_q = grad_k = None
        return grad_q, grad_k, grad_v, None, None, None, grad_position_weight, grad_time_weight, None, None


def _arguments(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    functional: bool,
) -> tuple[list[Tensor | None], tuple[int, int, int], list[int]]:
    """What a kernel reads, the shape (heads, d, e), and the numbers that follow; keep the tensors until it has run."""
    q, k = (None if x is None else packed_heads(x) for x in (q, k))
    v = packed_heads(v)
    others = (x.contiguous() for x in (offsets, query_times, key_times, position_weight, time_weight))
    boundaries = bucket_boundaries(0 if functional else time_weight.numel() - 1)
    d, q_stride = (0, 0) if q is None else (q.shape[2], q.stride(0))
    k_stride = 0 if k is None else k.stride(0)
    numbers = [offsets.numel() - 1, q_stride, k_stride, v.stride(0), max_len, time_weight.numel(), int(functional)]
    return [q, k, v, *others, boundaries], (v.shape[1], d, v.shape[2]), numbers


_hstu = _Attention("hstu", channels=0)
fuxi_attention = _Attention("fuxi", channels=2)
"""See `turbogr.ops.jagged_attention.fuxi.fuxi_attention`; `time_weight` is the decay (a, β, γ) if `functional`."""


def hstu_attention(*inputs: Any) -> Tensor:
    """See `turbogr.ops.jagged_attention.hstu_attention`."""
    return _hstu(*inputs, False)
