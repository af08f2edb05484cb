"""sampled_softmax on Triton kernels: rows are read in place, and scores computed again in the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import triton_losses, triton_runtime
from turbogr.ops.checks import check_index, check_offsets
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.triton_runtime import DEVICES

BACKEND = triton_runtime.BACKEND


def _empty_outputs(queries: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the logarithm of each position's sum."""
    return queries.new_empty(queries.shape[0]), queries.new_empty(queries.shape[0], dtype=torch.float32)


@torch_operator("sampled_softmax_triton", outputs="loss log_sums", fake=_empty_outputs, device=DEVICES)
def _forward(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    groups: Tensor | None,
    temperature: float,
    normalize: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    check_index("positives", positives, rows.shape[0])
    check_index("negatives", negatives, rows.shape[0])
    if groups is not None:
        check_offsets(groups, queries.shape[0], filled=True)
    return triton_losses.loss_forward(
        triton_losses.prepare(queries, rows, positives, negatives, groups, log_q, temperature, normalize, precision)
    )


def _empty_gradients(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape), rows.new_empty(rows.shape)


@torch_operator("sampled_softmax_triton_backward", fake=_empty_gradients, device=DEVICES)
def _backward(
    grad: Tensor,
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    groups: Tensor | None,
    loss: Tensor,
    log_sums: Tensor,
    temperature: float,
    normalize: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    scoring = triton_losses.prepare(
        queries, rows, positives, negatives, groups, log_q, temperature, normalize, precision
    )
    return triton_losses.loss_backward(scoring, grad, loss, log_sums)


set_gradient(_forward, _backward, of="queries rows")


def sampled_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    temperature: float,
    normalize: bool,
    log_q: Tensor | None,
    groups: Tensor | None,
    precision: str,
    keep: bool,
) -> Tensor:
    """See `turbogr.ops.sampled_softmax.sampled_softmax`; nothing is kept, whatever `keep` says."""
    loss: Tensor = _forward(queries, rows, positives, negatives, log_q, groups, temperature, normalize, precision)[0]
    return loss
