"""gated_mlp compiled: one kernel per direction with small weights, else the compiled operators that it is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.gated_linear import cpu as gated_linear
from turbogr.ops.keyed_dropout import cpu as keyed_dropout
from turbogr.ops.native import Kernel, pointer
from turbogr.ops.norm_linear import cpu as norm_linear
from turbogr.ops.norm_linear.cpu import NORMS, strided_rows
from turbogr.ops.norm_linear.reference import normalize
from turbogr.random import Dropout, dropout_threshold

# Up to this many elements of one weight, all that the backward needs of the three (five packed copies and three sums)
# stays in the second-level cache.
SMALL_WEIGHT = 2**15

_forward = Kernel("gated_mlp", "ppppppiiiiifuif")
_backward = Kernel("gated_mlp_backward", "ppppppppppiiiiiifuif")


def _gated_mlp(
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
    _forward(
        x.data_ptr(),
        *(weight.data_ptr() for weight in weights),
        pointer(keys),
        out.data_ptr(),
        *x.shape,
        gate_weight.shape[1],
        x.stride(0),
        NORMS[norm],
        eps,
        seed,
        dropout_threshold(rate),
        1 / (1 - rate),
    )
    return out


def _gradients(
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
    outs = _empty(x, gate_weight, up_weight, down_weight)
    keys = None if keys is None else native.int64(keys)
    _backward(
        grad.data_ptr(),
        x.data_ptr(),
        *(weight.data_ptr() for weight in weights),
        pointer(keys),
        *(out.data_ptr() for out in outs),
        *x.shape,
        gate_weight.shape[1],
        grad.stride(0),
        x.stride(0),
        NORMS[norm],
        eps,
        seed,
        dropout_threshold(rate),
        1 / (1 - rate),
    )
    return outs


def _empty(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate, up, down = (weight.new_empty(weight.shape) for weight in weights)
    return x.new_empty(x.shape), gate, up, down


def _fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gradients(
    grad: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(x, gate_weight, up_weight, down_weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.norm, ctx.eps, ctx.rate, ctx.seed = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    gradients = torch.ops.turbogr.gated_mlp_backward(grad, *ctx.saved_tensors, ctx.norm, ctx.eps, ctx.rate, ctx.seed)
    return (*gradients, None, None, None, None, None)


native.define(
    "gated_mlp(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, Tensor? keys, str norm, float eps, "
    "float rate, int seed) -> Tensor",
    _gated_mlp,
    _fake,
    backward=_differentiate,
    setup_context=_save,
)
native.define(
    "gated_mlp_backward(Tensor grad, Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, Tensor? keys, "
    "str norm, float eps, float rate, int seed) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


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
        return _composed(x, gate_weight, up_weight, down_weight, norm, eps, dropout, keys)
    rate, seed = dropout or (0.0, 0)
    out: Tensor = torch.ops.turbogr.gated_mlp(x, gate_weight, up_weight, down_weight, keys, norm, eps, rate, seed)
    return out


def _composed(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    norm: str,
    eps: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    inner = normalize(x, norm, eps)
    if dropout is not None and keys is not None:
        inner = keyed_dropout.keyed_dropout(inner, dropout, keys)
    widths = [gate_weight.shape[1]]
    (gate,) = norm_linear.norm_linear(inner, gate_weight, None, widths, "none", "silu", eps)
    (up,) = norm_linear.norm_linear(inner, up_weight, None, widths, "none", "none", eps)
    return gated_linear.gated_linear(up, gate, x, down_weight, None, "none", eps, None, None)
