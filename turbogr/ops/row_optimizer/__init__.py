"""Optimisers that update only some rows of a table, in place: the update of a table after each step.

Both take `weight` [V, d], `index` [R] distinct rows and their summed gradients `grad` [R, d]. The other rows and
their state are not touched, so the cost depends on the batch, not on the table.

With `places` [n] the gradients `grad` [n, d] are not summed yet: number i is of the row index[places[i]]. Those of one
row are added in a fixed order, in the same pass where the backend can.
"""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_dtypes, check_shape


def row_adam_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    index: Tensor,
    grad: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    places: Tensor | None = None,
) -> None:
    """Adam with decoupled weight decay on the rows `index`; `mean` and `square` [V, d] are its moments.

    `step` counts from 1 and corrects the bias of the moments, which for a row that every step touches is exactly
    AdamW; a row that steps skip keeps its moments as they are.
    """
    _check(weight, index, grad, places, mean=mean, square=square)
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    function = registry.choose("row_adam_", weight.device, weight.dtype)
    function(weight, mean, square, index, grad, places, step, lr, *betas, eps, weight_decay)


def row_adagrad_(
    weight: Tensor,
    square: Tensor,
    index: Tensor,
    grad: Tensor,
    *,
    lr: float,
    eps: float,
    places: Tensor | None = None,
) -> None:
    """Adagrad on the rows `index`: square += grad², weight -= lr · grad / (sqrt(square) + eps); `square` [V, d]."""
    _check(weight, index, grad, places, square=square)
    registry.choose("row_adagrad_", weight.device, weight.dtype)(weight, square, index, grad, places, lr, eps)


def _check(weight: Tensor, index: Tensor, grad: Tensor, places: Tensor | None, **state: Tensor) -> None:
    check_shape("weight", weight, (None, None))
    check_shape("index", index, (None,))
    if places is not None:
        check_shape("places", places, (None,))
    check_shape("grad", grad, ((index if places is None else places).shape[0], weight.shape[1]))
    check_dtypes(weight.dtype, grad=grad, **state)
    for name, tensor in state.items():
        check_shape(name, tensor, tuple(weight.shape))


registry.register_operator("row_adam_", package=__name__)
registry.register_operator("row_adagrad_", package=__name__)
