"""sampled_softmax on compiled kernels: candidates are scored and reduced position by position."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index, check_offsets
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import Kernel, pointer

BACKEND = native.BACKEND

_SIZES = (
    "int64 num_positions, num_groups, largest, num_negatives, num_rows, width; float inverse_temperature; "
    "int64 normalize, precision"
)
_forward_kernel = Kernel(
    "sampled_softmax_forward",
    "float *queries, *rows; int32 *positives, *negatives; float *log_q; int64 *offsets; "
    f"float *loss, *inverse_queries, *inverse_rows, *probabilities, *unit_gradients; {_SIZES}",
)
_backward_kernel = Kernel(
    "sampled_softmax_backward",
    "float *grad_loss, *queries, *rows; int32 *positives, *negatives; float *log_q; int64 *offsets; "
    f"float *inverse_queries, *inverse_rows, *probabilities, *unit_gradients, *grad_queries, *grad_rows; {_SIZES}",
)

_PRECISIONS = {"fp32": 0, "fp16": 1, "int8": 2}  # as in the kernel

# Probabilities are kept for the backward up to this many (256 MB); beyond it they are computed again, in portions.
_MAX_KEPT = 2**26


def _empty_outputs(
    queries: Tensor, rows: Tensor, negatives: Tensor, normalize: bool, needs_gradient: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, inverse norms of queries and rows, probabilities of the candidates, gradients of queries by unit loss."""
    num_positions, width = queries.shape
    num_negatives = negatives.shape[1]
    keep = keep and needs_gradient and num_positions * (num_negatives + 1) <= _MAX_KEPT
    return (
        queries.new_empty(num_positions),
        queries.new_empty(num_positions),
        queries.new_empty(rows.shape[0] if normalize else 0),
        queries.new_empty(num_positions if keep else 0, num_negatives + 1),
        queries.new_empty(num_positions if needs_gradient else 0, width),
    )


@torch_operator(
    "sampled_softmax",
    outputs="loss inverse_queries inverse_rows probabilities unit_gradients",
    fake=_empty_outputs,
)
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
    needs_gradient: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_index("positives", positives, rows.shape[0])
    check_index("negatives", negatives, rows.shape[0])
    if groups is not None:
        check_offsets(groups, queries.shape[0], filled=True)
    queries, rows = queries.contiguous(), rows.contiguous()
    positives, negatives = native.int32(positives), native.int32(negatives)
    log_q = None if log_q is None else log_q.to(torch.float32).contiguous()
    groups = None if groups is None else native.int64(groups)
    outputs = _empty_outputs(queries, rows, negatives, normalize, needs_gradient, keep)
    loss, inverse_queries, inverse_rows, probabilities, unit_gradients = outputs
    _forward_kernel(
        queries.data_ptr(),
        rows.data_ptr(),
        positives.data_ptr(),
        negatives.data_ptr(),
        pointer(log_q),
        pointer(groups),
        loss.data_ptr(),
        inverse_queries.data_ptr(),
        inverse_rows.data_ptr(),
        probabilities.data_ptr() if probabilities.numel() else None,
        unit_gradients.data_ptr() if needs_gradient else None,
        *_sizes(queries, rows, negatives, groups, temperature, normalize, precision),
    )
    return outputs


def _sizes(
    queries: Tensor,
    rows: Tensor,
    negatives: Tensor,
    groups: Tensor | None,
    temperature: float,
    normalize: bool,
    precision: str,
) -> tuple[float, ...]:
    """Arguments of both kernels besides their arrays."""
    largest = 1 if groups is None or groups.numel() < 2 else int(groups.diff().max())
    return (
        queries.shape[0],
        negatives.shape[0],
        largest,
        negatives.shape[1],
        *rows.shape,
        1 / temperature,
        normalize,
        _PRECISIONS[precision],
    )


@torch_operator(
    "sampled_softmax_backward",
    fake=lambda queries, rows: (queries.new_empty(queries.shape), rows.new_empty(rows.shape)),
)
def _backward(
    grad: Tensor,
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    groups: Tensor | None,
    inverse_queries: Tensor,
    inverse_rows: Tensor,
    probabilities: Tensor,
    unit_gradients: Tensor,
    temperature: float,
    normalize: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    grad, queries, rows = grad.contiguous(), queries.contiguous(), rows.contiguous()
    positives, negatives = native.int32(positives), native.int32(negatives)
    log_q = None if log_q is None else log_q.to(torch.float32).contiguous()
    groups = None if groups is None else native.int64(groups)
    grad_queries, grad_rows = torch.empty_like(queries), torch.empty_like(rows)
    _backward_kernel(
        grad.data_ptr(),
        queries.data_ptr(),
        rows.data_ptr(),
        positives.data_ptr(),
        negatives.data_ptr(),
        pointer(log_q),
        pointer(groups),
        inverse_queries.data_ptr(),
        inverse_rows.data_ptr(),
        probabilities.data_ptr() if probabilities.numel() else None,
        unit_gradients.data_ptr(),
        grad_queries.data_ptr(),
        grad_rows.data_ptr(),
        *_sizes(queries, rows, negatives, groups, temperature, normalize, precision),
    )
    return grad_queries, grad_rows


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
    """See `turbogr.ops.sampled_softmax.sampled_softmax`."""
    needs_gradient = torch.is_grad_enabled() and (queries.requires_grad or rows.requires_grad)
    loss: Tensor = _forward(
        queries, rows, positives, negatives, log_q, groups, temperature, normalize, precision, needs_gradient, keep
    )[0]
    return loss
