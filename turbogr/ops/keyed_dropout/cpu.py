"""keyed_dropout on a compiled kernel; the mask is drawn again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel
from turbogr.random import Dropout, dropout_threshold

_kernel = Kernel("keyed_dropout", "pppiiuif")


def _drop(x: Tensor, keys: Tensor, rate: float, seed: int) -> Tensor:
    x, keys = x.contiguous(), native.int64(keys)
    out = torch.empty_like(x)
    _kernel(
        x.data_ptr(),
        keys.data_ptr(),
        out.data_ptr(),
        *x.shape,
        seed,
        dropout_threshold(rate),
        1 / (1 - rate),
    )
    return out


def _fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, keys, ctx.rate, ctx.seed = inputs
    ctx.save_for_backward(keys)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (keys,) = ctx.saved_tensors
    return torch.ops.turbogr.keyed_dropout(grad, keys, ctx.rate, ctx.seed), None, None, None


native.define(
    "keyed_dropout(Tensor x, Tensor keys, float rate, int seed) -> Tensor",
    _drop,
    _fake,
    backward=_autograd,
    setup_context=_setup_context,
)


def keyed_dropout(x: Tensor, dropout: Dropout, keys: Tensor) -> Tensor:
    """See `turbogr.ops.keyed_dropout.keyed_dropout`."""
    out: Tensor = torch.ops.turbogr.keyed_dropout(x, keys, *dropout)
    return out
