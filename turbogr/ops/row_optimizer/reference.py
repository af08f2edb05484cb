"""The definition of the row optimisers in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turbogr.ops.checks import check_index
from turbogr.ops.registry import REFERENCE

BACKEND = REFERENCE


@torch.no_grad()
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
    check_index("index", index, weight.shape[0])
    grad = sum_duplicates(grad, places, index.shape[0])
    m = mean[index].lerp_(grad, 1 - beta1)
    v = square[index].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    mean[index], square[index] = m, v
    denominator = v.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(eps)
    decayed = weight[index].mul_(1 - lr * weight_decay)
    weight[index] = decayed.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))


@torch.no_grad()
def row_adagrad_(
    weight: Tensor, square: Tensor, index: Tensor, grad: Tensor, places: Tensor | None, lr: float, eps: float
) -> None:
    """See `turbogr.ops.row_optimizer.row_adagrad_`."""
    check_index("index", index, weight.shape[0])
    grad = sum_duplicates(grad, places, index.shape[0])
    s = square[index].addcmul_(grad, grad)
    square[index] = s
    weight[index] = weight[index].addcdiv_(grad, s.sqrt_().add_(eps), value=-lr)


def sum_duplicates(grad: Tensor, places: Tensor | None, num_rows: int) -> Tensor:
    """The gradients [num_rows, d] themselves if there are no places, else their sums by place."""
    if places is None:
        return grad
    check_index("places", places, num_rows)
    return grad.new_zeros(num_rows, grad.shape[1]).index_add_(0, places, grad)
