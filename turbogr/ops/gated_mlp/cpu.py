"""gated_mlp compiled: one kernel per direction if the weights are small, else a chain of other compiled operators."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import native
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.gated_linear import cpu as gated_linear
from turbogr.ops.keyed_dropout import cpu as keyed_dropout
from turbogr.ops.native import DROPOUT, Kernel, dropout_arguments, pointer
from turbogr.ops.norm_linear import cpu as norm_linear
from turbogr.ops.norm_linear.cpu import NORMS, strided_rows
from turbogr.random import Dropout

BACKEND = native.MODEL_BACKEND

# Up to this many elements of one weight, all that the backward needs of the three (five packed copies and three sums)
# stays in the second-level cache.
SMALL_WEIGHT = 2**15

_forward_kernel = Kernel(
    "gated_mlp",
    "float *x, *gate_weight, *up_weight, *down_weight; int64 *keys; float *out; "
    f"int64 num_rows, width, hidden, stride, norm; float eps; {DROPOUT}",
)
_backward_kernel = Kernel(
    "gated_mlp_backward",
    "float *grad, *x, *gate_weight, *up_weight, *down_weight; int64 *keys; "
    "float *grad_x, *grad_gate_weight, *grad_up_weight, *grad_down_weight; "
    f"int64 num_rows, width, hidden, grad_stride, stride, norm; float eps; {DROPOUT}",
)


@torch_operator("gated_mlp", fake=lambda x: x.new_empty(x.shape))
def _forward(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    keys: Tensor | None,
    norm: str,
    eps: float,
    rate: float,
    seed: int,
) -> Tensor:
    x, out = strided_rows(x), x.new_empty(x.shape)
    weights = [weight.contiguous() for weight in (gate_weight, up_weight, down_weight)]
    keys = None if keys is None else native.int64(keys)
    _forward_kernel(
        x.data_ptr(),
        *(weight.data_ptr() for weight in weights),
        pointer(keys),
        out.data_ptr(),
        *x.shape,
        gate_weight.shape[1],
        x.stride(0),
        NORMS[norm],
        eps,
        *dropout_arguments(rate, seed),
    )
    return out


def _empty_gradients(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_gate, grad_up, grad_down = (weight.new_empty(weight.shape) for weight in (gate_weight, up_weight, down_weight))
    return x.new_empty(x.shape), grad_gate, grad_up, grad_down


@torch_operator("gated_mlp_backward", fake=_empty_gradients)
def _backward(
    grad: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    keys: Tensor | None,
    norm: str,
    eps: float,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, x = strided_rows(grad), strided_rows(x)
    weights = [weight.contiguous() for weight in (gate_weight, up_weight, down_weight)]
    grads = _empty_gradients(x, gate_weight, up_weight, down_weight)
    keys = None if keys is None else native.int64(keys)
    _backward_kernel(
        grad.data_ptr(),
        x.data_ptr(),
        *(weight.data_ptr() for weight in weights),
        pointer(keys),
        *(gradient.data_ptr() for gradient in grads),
        *x.shape,
        gate_weight.shape[1],
        grad.stride(0),
        x.stride(0),
        NORMS[norm],
        eps,
        *dropout_arguments(rate, seed),
    )
    return grads


set_gradient(_forward, _backward, of="x gate_weight up_weight down_weight")


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    norm: str,
    eps: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.gated_mlp.gated_mlp`."""
    if gate_weight.numel() > SMALL_WEIGHT:
        return _chained(x, gate_weight, up_weight, down_weight, norm, eps, dropout, keys)
    rate, seed = dropout or (0.0, 0)
    out: Tensor = _forward(x, gate_weight, up_weight, down_weight, keys, norm, eps, rate, seed)
    return out


def _chained(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    norm: str,
    eps: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    inner = norm_linear.normalize(x, norm, eps)
    if dropout is not None and keys is not None:
        inner = keyed_dropout.keyed_dropout(inner, dropout, keys)
    widths = [gate_weight.shape[1]]
    (gate,) = norm_linear.norm_linear(inner, gate_weight, None, widths, "none", "silu", eps)
    (up,) = norm_linear.norm_linear(inner, up_weight, None, widths, "none", "none", eps)
    return gated_linear.gated_linear(up, gate, x, down_weight, None, "none", eps, None, None)
