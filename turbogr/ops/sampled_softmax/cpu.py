"""sampled_softmax on compiled kernels: candidates are scored and reduced position by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index, check_offsets
from turbogr.ops.native import Kernel, pointer

_forward = Kernel("sampled_softmax_forward", "p" * 11 + "iiiiiifii")
_backward = Kernel("sampled_softmax_backward", "p" * 13 + "iiiiiifii")

_PRECISIONS = {"fp32": 0, "fp16": 1, "int8": 2}  # as in the kernel

# Probabilities are kept for the backward up to this many (256 MB); beyond it they are computed again, in portions.
_MAX_KEPT = 2**26


def _loss(
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
    outputs = _outputs(queries, rows, negatives.shape[1], normalize, needs_gradient, keep)
    loss, inverse_queries, inverse_rows, probabilities, unit_gradients = outputs
    _forward(
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
    """What both kernels are told besides their arrays."""
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


def _outputs(
    queries: Tensor, rows: Tensor, num_negatives: int, normalize: bool, needs_gradient: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, inverse norms of queries and rows, probabilities of the candidates, gradients of queries by unit loss."""
    num_positions, width = queries.shape
    keep = keep and needs_gradient and num_positions * (num_negatives + 1) <= _MAX_KEPT
    return (
        queries.new_empty(num_positions),
        queries.new_empty(num_positions),
        queries.new_empty(rows.shape[0] if normalize else 0),
        queries.new_empty(num_positions if keep else 0, num_negatives + 1),
        queries.new_empty(num_positions if needs_gradient else 0, width),
    )


def _gradients(
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
    _backward(
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


def _fake_loss(
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
    return _outputs(queries, rows, negatives.shape[1], normalize, needs_gradient, keep)


def _fake_gradients(grad: Tensor, queries: Tensor, rows: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape), rows.new_empty(rows.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.temperature, ctx.normalize, ctx.precision, _, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _differentiate(ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 11
    grad_queries, grad_rows = torch.ops.turbogr.sampled_softmax_backward(
        grad, *ctx.saved_tensors, ctx.temperature, ctx.normalize, ctx.precision
    )
    return grad_queries, grad_rows, *((None,) * 9)


native.define(
    "sampled_softmax(Tensor queries, Tensor rows, Tensor positives, Tensor negatives, Tensor? log_q, Tensor? groups, "
    "float temperature, bool normalize, str precision, bool needs_gradient, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _loss,
    _fake_loss,
    backward=_differentiate,
    setup_context=_save,
)
native.define(
    "sampled_softmax_backward(Tensor grad, Tensor queries, Tensor rows, Tensor positives, Tensor negatives, "
    "Tensor? log_q, Tensor? groups, Tensor inverse_queries, Tensor inverse_rows, Tensor probabilities, "
    "Tensor unit_gradients, float temperature, bool normalize, str precision) -> (Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


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
    loss: Tensor = torch.ops.turbogr.sampled_softmax(
        queries, rows, positives, negatives, log_q, groups, temperature, normalize, precision, needs_gradient, keep
    )[0]
    return loss
