"""The row optimisers on compiled kernels: one pass over the rows that are updated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import torch_operator
from turbogr.ops.look_up.cpu import sum_rows
from turbogr.ops.native import Kernel

BACKEND = native.BACKEND

_adam_kernel = Kernel(
    "row_adam",
    "float *weight, *mean, *square; int64 *index; float *grad; int64 num_rows, width; "
    "float mean_share, beta2, square_share, eps, decay, step_size, inverse_root_correction",
)
_adagrad_kernel = Kernel(
    "row_adagrad", "float *weight, *square; int64 *index; float *grad; int64 num_rows, width; float lr, eps"
)


@torch.no_grad()
@torch_operator("row_adam_", mutates="weight mean square")
def row_adam_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    index: Tensor,
    grad: Tensor,
    places: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """See `turbogr.ops.row_optimizer.row_adam_`."""
    require_contiguous(weight=weight, mean=mean, square=square)
    check_index("index", index, weight.shape[0])
    index, grad = native.int64(index), _summed(grad, places, index.shape[0])
    _adam_kernel(
        weight.data_ptr(),
        mean.data_ptr(),
        square.data_ptr(),
        index.data_ptr(),
        grad.data_ptr(),
        index.numel(),
        weight.shape[1],
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        1 - lr * weight_decay,
        lr / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
    )


@torch.no_grad()
@torch_operator("row_adagrad_", mutates="weight square")
def row_adagrad_(
    weight: Tensor, square: Tensor, index: Tensor, grad: Tensor, places: Tensor | None, lr: float, eps: float
) -> None:
    """See `turbogr.ops.row_optimizer.row_adagrad_`."""
    require_contiguous(weight=weight, square=square)
    check_index("index", index, weight.shape[0])
    index, grad = native.int64(index), _summed(grad, places, index.shape[0])
    _adagrad_kernel(
        weight.data_ptr(),
        square.data_ptr(),
        index.data_ptr(),
        grad.data_ptr(),
        index.numel(),
        weight.shape[1],
        lr,
        eps,
    )


def _summed(grad: Tensor, places: Tensor | None, num_rows: int) -> Tensor:
    """The gradients of distinct rows: sums in the order of the gradients, for any number of threads."""
    if places is None:
        return grad.contiguous()
    check_index("places", places, num_rows)
    return sum_rows([grad], places, [places.shape[0]], num_rows, grad.shape[1])


def require_contiguous(**tensors: Tensor) -> None:
    """Refuse tensors that cannot be updated in place."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous to be updated in place, got strides {tensor.stride()}")
