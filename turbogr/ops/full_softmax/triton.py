"""full_softmax on Triton kernels: that of one group of positions whose candidates are all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import triton_losses, triton_runtime
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.triton_losses import Scoring
from turbogr.ops.triton_runtime import DEVICES

BACKEND = triton_runtime.BACKEND


def _prepare(queries: Tensor, rows: Tensor, targets: Tensor, temperature: float, normalize: bool) -> Scoring:
    return triton_losses.prepare(queries, rows, targets, None, None, None, temperature, normalize, "fp32")


def _empty_outputs(queries: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the logarithm of each position's sum."""
    return queries.new_empty(queries.shape[0]), queries.new_empty(queries.shape[0], dtype=torch.float32)


@torch_operator("full_softmax_triton", outputs="loss log_sums", fake=_empty_outputs, device=DEVICES)
def _forward(
    queries: Tensor, rows: Tensor, targets: Tensor, temperature: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    check_index("targets", targets, rows.shape[0])
    return triton_losses.loss_forward(_prepare(queries, rows, targets, temperature, normalize))


@torch_operator(
    "full_softmax_triton_backward",
    fake=lambda queries, rows: (queries.new_empty(queries.shape), rows.new_empty(rows.shape)),
    device=DEVICES,
)
def _backward(
    grad: Tensor,
    queries: Tensor,
    rows: Tensor,
    targets: Tensor,
    loss: Tensor,
    log_sums: Tensor,
    temperature: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    return triton_losses.loss_backward(_prepare(queries, rows, targets, temperature, normalize), grad, loss, log_sums)


set_gradient(_forward, _backward, of="queries rows")


def full_softmax(queries: Tensor, rows: Tensor, targets: Tensor, temperature: float, normalize: bool) -> Tensor:
    """See `turbogr.ops.full_softmax.full_softmax`."""
    loss: Tensor = _forward(queries, rows, targets, temperature, normalize)[0]
    return loss
