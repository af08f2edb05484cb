"""HSTU's and FuXi's attention on compiled kernels: tiled, with a backward that recomputes the scores.

Both take the same arguments and differ in their kernels and in the number of channels of the output. HSTU's has one
channel, always has content, and its time bias is a table.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_offsets
from turbogr.ops.declaration import TorchOperator, set_gradient, torch_operator
from turbogr.ops.jagged_attention.masks import KeyRanges, check_ranges
from turbogr.ops.jagged_attention.reference import DAYS, FORMS, TABLE, bucket_boundaries
from turbogr.ops.native import Kernel, packed_heads, pointer

BACKEND = native.MODEL_BACKEND

# Sequences up to this length are cut into smaller blocks: see "Tile sizes" in README.md. The criterion is the model's
# longest length, not the batch's, so that a sequence gives the same output whatever it is batched with.
SMALL_BLOCKS_UP_TO = 256

# Arguments that the kernels of both directions share.
_TENSORS = (
    "float *q, *k, *v; int64 *offsets, *first, *last, *query_times, *key_times; "
    "float *position_weight, *time_weight; int64 *boundaries"
)
_NUMBERS = (
    "int64 num_sequences, num_tokens, heads, d, e, q_stride, k_stride, v_stride, "
    "max_len, num_time_weights, form; float alpha"
)
_GRADIENTS = "float *grad_q, *grad_k, *grad_v, *grad_position_weight, *grad_time_weight"

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class _Inputs(NamedTuple):
    """The arguments of an attention operator; those of its backward operator are `grad` and the same.

    Without `first` and `last` attention is causal. Times and weights are None for HSTU without a bias.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    offsets: Tensor
    first: Tensor | None
    last: Tensor | None
    query_times: Tensor | None
    key_times: Tensor | None
    position_weight: Tensor | None
    time_weight: Tensor | None
    max_len: int
    form: str
    alpha: float


class _KernelInTwoSizes:
    """A kernel for blocks of two sizes."""

    def __init__(self, name: str, arguments: str) -> None:
        self._large = Kernel(name, arguments)
        self._small = Kernel(name, arguments, variant="small")

    def for_length(self, max_len: int) -> Kernel:
        return self._small if max_len <= SMALL_BLOCKS_UP_TO else self._large


def _declare(name: str, *, bias_channels: int) -> TorchOperator:
    """`torch.ops.turbogr.<name>_attention` and its gradient, on the kernels `<name>_forward` and `<name>_backward`.

    The output has `bias_channels` and, with q and k, one for content.
    """
    forward_kernel = _KernelInTwoSizes(f"{name}_forward", f"{_TENSORS}; float *out; {_NUMBERS}")
    backward_kernel = _KernelInTwoSizes(f"{name}_backward", f"float *grad_out; {_TENSORS}; {_GRADIENTS}; {_NUMBERS}")

    def empty_output(q: Tensor | None, v: Tensor) -> Tensor:
        num_tokens, heads, e = v.shape
        return v.new_empty(num_tokens, heads, (bias_channels + (q is not None)) * e)

    @torch_operator(f"{name}_attention", fake=empty_output)
    def forward(inputs: _Inputs) -> Tensor:
        check_offsets(inputs.offsets, inputs.v.shape[0], inputs.max_len)
        if inputs.first is not None and inputs.last is not None:
            check_ranges(KeyRanges(inputs.first, inputs.last), inputs.offsets, inputs.v.shape[0])
        tensors, numbers = _kernel_arguments(inputs)
        out = empty_output(inputs.q, inputs.v)
        kernel = forward_kernel.for_length(inputs.max_len)
        kernel(*map(pointer, tensors), pointer(out), *numbers)
        return out

    @torch_operator(f"{name}_attention_backward", fake=_empty_gradients)
    def backward(grad: Tensor, inputs: _Inputs) -> _Gradients:
        tensors, numbers = _kernel_arguments(inputs)
        grad = grad.contiguous()
        grads = _empty_gradients(inputs.q, inputs.k, inputs.v, inputs.position_weight, inputs.time_weight)
        kernel = backward_kernel.for_length(inputs.max_len)
        kernel(pointer(grad), *map(pointer, tensors), *map(pointer, grads), *numbers)
        return grads

    set_gradient(forward, backward, of="q k v position_weight time_weight")
    return forward


def _kernel_arguments(inputs: _Inputs) -> tuple[list[Tensor | None], list[float]]:
    """The tensors that a kernel reads (keep them until it has run), and the numbers that come last."""
    q, k = (None if x is None else packed_heads(x) for x in (inputs.q, inputs.k))
    v = packed_heads(inputs.v)
    times = inputs.query_times, inputs.key_times
    weights = inputs.position_weight, inputs.time_weight
    others = (inputs.offsets, inputs.first, inputs.last, *times, *weights)
    rest = [None if x is None else x.contiguous() for x in others]
    num_time_weights = 0 if inputs.time_weight is None else inputs.time_weight.numel()
    boundaries = bucket_boundaries(max(0, num_time_weights - 1) if inputs.form == TABLE else 0)
    num_tokens, heads, e = v.shape
    numbers = [
        inputs.offsets.numel() - 1,
        num_tokens,
        heads,
        0 if q is None else q.shape[2],
        e,
        *(0 if x is None else x.stride(0) for x in (q, k, v)),
        inputs.max_len,
        num_time_weights,
        FORMS.index(inputs.form),
        inputs.alpha,
    ]
    return [q, k, v, *rest, boundaries], numbers


def _empty_gradients(
    q: Tensor | None, k: Tensor | None, v: Tensor, position_weight: Tensor | None, time_weight: Tensor | None
) -> _Gradients:
    def empty_like(x: Tensor | None) -> Tensor:
        return v.new_empty(0) if x is None else x.new_empty(x.shape)

    return empty_like(q), empty_like(k), empty_like(v), empty_like(position_weight), empty_like(time_weight)


_hstu_attention = _declare("hstu", bias_channels=0)
_fuxi_attention = _declare("fuxi", bias_channels=2)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    position_weight: Tensor | None,
    time_weight: Tensor | None,
    max_len: int,
    alpha: float,
) -> Tensor:
    """See `turbogr.ops.jagged_attention.hstu_attention`."""
    bias = query_times, key_times, position_weight, time_weight
    out: Tensor = _hstu_attention(q, k, v, offsets, *(visible or (None, None)), *bias, max_len, TABLE, alpha)
    return out


def fuxi_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    functional: bool,
) -> Tensor:
    """See `turbogr.ops.jagged_attention.fuxi.fuxi_attention`; `time_weight` is the decay (a, β, γ) if `functional`."""
    bias = query_times, key_times, position_weight, time_weight
    form = DAYS if functional else TABLE
    out: Tensor = _fuxi_attention(q, k, v, offsets, *(visible or (None, None)), *bias, max_len, form, 1.0)
    return out


def fuxi_seconds_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    offsets: Tensor,
    visible: KeyRanges | None,
    query_times: Tensor,
    key_times: Tensor,
    position_weight: Tensor,
    time_weight: Tensor,
    max_len: int,
    form: str,
) -> Tensor:
    """The same with a function of seconds, whose parameters `time_weight` holds."""
    bias = query_times, key_times, position_weight, time_weight
    out: Tensor = _fuxi_attention(q, k, v, offsets, *(visible or (None, None)), *bias, max_len, form, 1.0)
    return out
