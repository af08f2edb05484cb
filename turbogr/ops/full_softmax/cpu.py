"""full_softmax on compiled kernels: tiles of logits are computed, used and dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import Kernel, pointer

BACKEND = native.BACKEND

_forward_kernel = Kernel(
    "full_softmax_forward",
    "float *queries, *rows; int32 *targets; float *inverse_queries, *inverse_rows, *loss, *tops, *totals, "
    "*unit_gradients; int64 num_positions, num_rows, width; float inverse_temperature",
)
_backward_kernel = Kernel(
    "full_softmax_backward",
    "float *grad_loss, *queries, *rows; int32 *targets; float *inverse_queries, *inverse_rows, *tops, *totals, "
    "*grad_rows; int64 num_positions, num_rows, width; float inverse_temperature",
)


def _outputs(
    queries: Tensor, rows: Tensor, normalize: bool, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and what the backward needs.

    That is the highest logit of each position, the sum of its exponentials relative to it, the inverse norms of queries
    and rows, and the gradients of the queries for unit gradients of the loss.
    """
    num_positions, width = queries.shape
    return (
        queries.new_empty(num_positions),
        queries.new_empty(num_positions),
        queries.new_empty(num_positions),
        queries.new_empty(num_positions if normalize else 0),
        queries.new_empty(rows.shape[0] if normalize else 0),
        queries.new_empty(num_positions if needs_gradient else 0, width),
    )


@torch_operator("full_softmax", fake=_outputs, outputs="loss tops totals inverse_queries inverse_rows unit_gradients")
def _forward(
    queries: Tensor, rows: Tensor, targets: Tensor, temperature: float, normalize: bool, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_index("targets", targets, rows.shape[0])
    queries, rows, targets = queries.contiguous(), rows.contiguous(), native.int32(targets)
    outputs = _outputs(queries, rows, normalize, needs_gradient)
    loss, tops, totals, inverse_queries, inverse_rows, unit_gradients = outputs
    _forward_kernel(
        queries.data_ptr(),
        rows.data_ptr(),
        targets.data_ptr(),
        pointer(inverse_queries if normalize else None),
        pointer(inverse_rows if normalize else None),
        loss.data_ptr(),
        tops.data_ptr(),
        totals.data_ptr(),
        pointer(unit_gradients if needs_gradient else None),
        queries.shape[0],
        *rows.shape,
        1 / temperature,
    )
    return outputs


@torch_operator(
    "full_softmax_backward", fake=lambda queries, rows: (queries.new_empty(queries.shape), rows.new_empty(rows.shape))
)
def _backward(
    grad: Tensor,
    queries: Tensor,
    rows: Tensor,
    targets: Tensor,
    tops: Tensor,
    totals: Tensor,
    inverse_queries: Tensor,
    inverse_rows: Tensor,
    unit_gradients: Tensor,
    temperature: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    grad, queries, rows, targets = grad.contiguous(), queries.contiguous(), rows.contiguous(), native.int32(targets)
    grad_rows = torch.empty_like(rows)
    _backward_kernel(
        grad.data_ptr(),
        queries.data_ptr(),
        rows.data_ptr(),
        targets.data_ptr(),
        pointer(inverse_queries if normalize else None),
        pointer(inverse_rows if normalize else None),
        tops.data_ptr(),
        totals.data_ptr(),
        grad_rows.data_ptr(),
        queries.shape[0],
        *rows.shape,
        1 / temperature,
    )
    return unit_gradients * grad[:, None], grad_rows


set_gradient(_forward, _backward, of="queries rows")


def full_softmax(queries: Tensor, rows: Tensor, targets: Tensor, temperature: float, normalize: bool) -> Tensor:
    """See `turbogr.ops.full_softmax.full_softmax`."""
    needs_gradient = torch.is_grad_enabled() and (queries.requires_grad or rows.requires_grad)
    loss: Tensor = _forward(queries, rows, targets, temperature, normalize, needs_gradient)[0]
    return loss
