"""The row optimisers on compiled kernels: one pass over the touched rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.native import Kernel

_adam = Kernel("row_adam", "pppppiifffffff")
_adagrad = Kernel("row_adagrad", "ppppiiff")


def _row_adam_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    index: Tensor,
    grad: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    for name, tensor in (("weight", weight), ("mean", mean), ("square", square)):
        _require_contiguous(name, tensor)
    check_index("index", index, weight.shape[0])
    index, grad = native.int64(index), grad.contiguous()
    _adam(
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


def _row_adagrad_(weight: Tensor, square: Tensor, index: Tensor, grad: Tensor, lr: float, eps: float) -> None:
    for name, tensor in (("weight", weight), ("square", square)):
        _require_contiguous(name, tensor)
    check_index("index", index, weight.shape[0])
    index, grad = native.int64(index), grad.contiguous()
    _adagrad(
        weight.data_ptr(),
        square.data_ptr(),
        index.data_ptr(),
        grad.data_ptr(),
        index.numel(),
        weight.shape[1],
        lr,
        eps,
    )


def _require_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous to be updated in place, got strides {tensor.stride()}")


def _fake(*args: object) -> None:
    """Nothing comes out: the state is changed in place."""


native.define(
    "row_adam_(Tensor(a!) weight, Tensor(b!) mean, Tensor(c!) square, Tensor index, Tensor grad, int step, float lr, "
    "float beta1, float beta2, float eps, float weight_decay) -> ()",
    _row_adam_,
    _fake,
)
native.define(
    "row_adagrad_(Tensor(a!) weight, Tensor(b!) square, Tensor index, Tensor grad, float lr, float eps) -> ()",
    _row_adagrad_,
    _fake,
)


@torch.no_grad()
def row_adam_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    index: Tensor,
    grad: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """See `turbogr.ops.row_optimizer.row_adam_`."""
    torch.ops.turbogr.row_adam_(weight, mean, square, index, grad, step, lr, beta1, beta2, eps, weight_decay)


@torch.no_grad()
def row_adagrad_(weight: Tensor, square: Tensor, index: Tensor, grad: Tensor, lr: float, eps: float) -> None:
    """See `turbogr.ops.row_optimizer.row_adagrad_`."""
    torch.ops.turbogr.row_adagrad_(weight, square, index, grad, lr, eps)
