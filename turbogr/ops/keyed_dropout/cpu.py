"""keyed_dropout on a compiled kernel; the backward draws the mask again, so that it need not be stored."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import DROPOUT, Kernel, dropout_arguments
from turbogr.random import Dropout

BACKEND = native.MODEL_BACKEND

_kernel = Kernel("keyed_dropout", f"float *x; int64 *keys; float *out; int64 num_rows, width; {DROPOUT}")

_bf16_kernel = Kernel("keyed_dropout_bf16", f"void *x; int64 *keys; void *out; int64 num_rows, width; {DROPOUT}")


def _drop_any(x: Tensor, keys: Tensor, rate: float, seed: int) -> Tensor:
    x, keys = x.contiguous(), native.int64(keys)
    out = torch.empty_like(x)
    kernel = _bf16_kernel if x.dtype == torch.bfloat16 else _kernel
    kernel(x.data_ptr(), keys.data_ptr(), out.data_ptr(), *x.shape, *dropout_arguments(rate, seed))
    return out


@torch_operator("keyed_dropout", fake=lambda x: x.new_empty(x.shape), bf16=_drop_any)
def _drop(x: Tensor, keys: Tensor, rate: float, seed: int) -> Tensor:
    return _drop_any(x, keys, rate, seed)


# The gradient of dropout is the same dropout of the output's gradient.
set_gradient(_drop, _drop, of="x")


def keyed_dropout(x: Tensor, dropout: Dropout, keys: Tensor) -> Tensor:
    """See `turbogr.ops.keyed_dropout.keyed_dropout`."""
    out: Tensor = _drop(x, keys, *dropout)
    return out
