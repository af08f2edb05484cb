"""sampled_softmax on compiled kernels: candidates are scored and reduced position by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel, pointer

_forward = Kernel("sampled_softmax_forward", "p" * 10 + "iiiifi")
_backward = Kernel("sampled_softmax_backward", "p" * 12 + "iiiifi")

# Probabilities are kept for the backward up to this many (256 MB); beyond it they are computed again, in portions.
_MAX_KEPT = 2**26


def _loss(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    temperature: float,
    normalize: bool,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    queries, rows = queries.contiguous(), rows.contiguous()
    positives, negatives = native.int32(positives), native.int32(negatives)
    log_q = None if log_q is None else log_q.to(torch.float32).contiguous()
    outputs = _outputs(queries, rows, negatives.shape[1], normalize, needs_gradient)
    loss, inverse_queries, inverse_rows, probabilities, unit_gradients = outputs
    _forward(
        queries.data_ptr(),
        rows.data_ptr(),
        positives.data_ptr(),
        negatives.data_ptr(),
        pointer(log_q),
        loss.data_ptr(),
        inverse_queries.data_ptr(),
        inverse_rows.data_ptr(),
        probabilities.data_ptr() if probabilities.numel() else None,
        unit_gradients.data_ptr() if needs_gradient else None,
        *negatives.shape,
        *rows.shape,
        1 / temperature,
        normalize,
    )
    return outputs


def _outputs(
    queries: Tensor, rows: Tensor, num_negatives: int, normalize: bool, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, inverse norms of queries and rows, probabilities of the candidates, gradients of queries by unit loss."""
    num_positions, width = queries.shape
    keep = needs_gradient and num_positions * (num_negatives + 1) <= _MAX_KEPT
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
    inverse_queries: Tensor,
    inverse_rows: Tensor,
    probabilities: Tensor,
    unit_gradients: Tensor,
    temperature: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    grad, queries, rows = grad.contiguous(), queries.contiguous(), rows.contiguous()
    positives, negatives = native.int32(positives), native.int32(negatives)
    log_q = None if log_q is None else log_q.to(torch.float32).contiguous()
    grad_queries, grad_rows = torch.empty_like(queries), torch.empty_like(rows)
    _backward(
        grad.data_ptr(),
        queries.data_ptr(),
        rows.data_ptr(),
        positives.data_ptr(),
        negatives.data_ptr(),
        pointer(log_q),
        inverse_queries.data_ptr(),
        inverse_rows.data_ptr(),
        probabilities.data_ptr() if probabilities.numel() else None,
        unit_gradients.data_ptr(),
        grad_queries.data_ptr(),
        grad_rows.data_ptr(),
        *negatives.shape,
        *rows.shape,
        1 / temperature,
        normalize,
    )
    return grad_queries, grad_rows


def _fake_loss(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    temperature: float,
    normalize: bool,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(queries, rows, negatives.shape[1], normalize, needs_gradient)


def _fake_gradients(grad: Tensor, queries: Tensor, rows: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape), rows.new_empty(rows.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    queries, rows, positives, negatives, log_q, ctx.temperature, ctx.normalize, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(queries, rows, positives, negatives, log_q, *output[1:])


def _differentiate(ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    grad_queries, grad_rows = torch.ops.turbogr.sampled_softmax_backward(
        grad, *ctx.saved_tensors, ctx.temperature, ctx.normalize
    )
    return grad_queries, grad_rows, None, None, None, None, None, None


native.define(
    "sampled_softmax(Tensor queries, Tensor rows, Tensor positives, Tensor negatives, Tensor? log_q, "
    "float temperature, bool normalize, bool needs_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _loss,
    _fake_loss,
    backward=_differentiate,
    setup_context=_save,
)
native.define(
    "sampled_softmax_backward(Tensor grad, Tensor queries, Tensor rows, Tensor positives, Tensor negatives, "
    "Tensor? log_q, Tensor inverse_queries, Tensor inverse_rows, Tensor probabilities, Tensor unit_gradients, "
    "float temperature, bool normalize) -> (Tensor, Tensor)",
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
) -> Tensor:
    """See `turbogr.ops.sampled_softmax.sampled_softmax`."""
    needs_gradient = torch.is_grad_enabled() and (queries.requires_grad or rows.requires_grad)
    loss: Tensor = torch.ops.turbogr.sampled_softmax(
        queries, rows, positives, negatives, log_q, temperature, normalize, needs_gradient
    )[0]
    return loss
