"""sampled_softmax on compiled kernels: no array of candidate vectors or logits, forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel, pointer

_forward = Kernel("sampled_softmax_forward", "pppppppppiiiifi")
_backward = Kernel("sampled_softmax_backward", "pppppppppppiiiifi")


def _sampled_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    temperature: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    queries, rows = queries.contiguous(), rows.contiguous()
    positives, negatives = native.int64(positives), native.int64(negatives)
    log_q = None if log_q is None else log_q.to(torch.float32).contiguous()
    num_tokens, num_rows = queries.shape[0], rows.shape[0]
    losses, sums, query_scales = (queries.new_empty(num_tokens) for _ in range(3))
    row_scales = rows.new_empty(num_rows)
    _forward(
        queries.data_ptr(),
        rows.data_ptr(),
        positives.data_ptr(),
        negatives.data_ptr(),
        pointer(log_q),
        losses.data_ptr(),
        sums.data_ptr(),
        query_scales.data_ptr(),
        row_scales.data_ptr(),
        num_tokens,
        negatives.shape[1],
        num_rows,
        rows.shape[1],
        1 / temperature,
        int(normalize),
    )
    return losses, sums, query_scales, row_scales


def _sampled_softmax_backward(
    grad: Tensor,
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    log_q: Tensor | None,
    sums: Tensor,
    query_scales: Tensor,
    row_scales: Tensor,
    temperature: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    grad, queries, rows = grad.contiguous(), queries.contiguous(), rows.contiguous()
    positives, negatives = native.int64(positives), native.int64(negatives)
    log_q = None if log_q is None else log_q.to(torch.float32).contiguous()
    grad_queries, grad_rows = torch.empty_like(queries), torch.empty_like(rows)
    _backward(
        queries.data_ptr(),
        rows.data_ptr(),
        positives.data_ptr(),
        negatives.data_ptr(),
        pointer(log_q),
        sums.data_ptr(),
        query_scales.data_ptr(),
        row_scales.data_ptr(),
        grad.data_ptr(),
        grad_queries.data_ptr(),
        grad_rows.data_ptr(),
        queries.shape[0],
        negatives.shape[1],
        rows.shape[0],
        rows.shape[1],
        1 / temperature,
        int(normalize),
    )
    return grad_queries, grad_rows


def _fake(queries: Tensor, rows: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    per_token = [queries.new_empty(queries.shape[0]) for _ in range(3)]
    return per_token[0], per_token[1], per_token[2], rows.new_empty(rows.shape[0])


def _fake_backward(grad: Tensor, queries: Tensor, rows: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(queries), torch.empty_like(rows)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    queries, rows, positives, negatives, log_q, ctx.temperature, ctx.normalize = inputs
    _, sums, query_scales, row_scales = output
    ctx.save_for_backward(queries, rows, positives, negatives, log_q, sums, query_scales, row_scales)
    ctx.mark_non_differentiable(sums, query_scales, row_scales)


def _autograd(ctx: Any, grad: Tensor, *unused: object) -> tuple[Any, ...]:
    grad_queries, grad_rows = torch.ops.turbogr.sampled_softmax_backward(
        grad, *ctx.saved_tensors, ctx.temperature, ctx.normalize
    )
    return grad_queries, grad_rows, None, None, None, None, None


native.define(
    "sampled_softmax(Tensor queries, Tensor rows, Tensor positives, Tensor negatives, Tensor? log_q, "
    "float temperature, bool normalize) -> (Tensor, Tensor, Tensor, Tensor)",
    _sampled_softmax,
    _fake,
    backward=_autograd,
    setup_context=_setup_context,
)
native.define(
    "sampled_softmax_backward(Tensor grad, Tensor queries, Tensor rows, Tensor positives, Tensor negatives, "
    "Tensor? log_q, Tensor sums, Tensor query_scales, Tensor row_scales, float temperature, bool normalize) "
    "-> (Tensor, Tensor)",
    _sampled_softmax_backward,
    _fake_backward,
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
    losses: Tensor = torch.ops.turbogr.sampled_softmax(
        queries, rows, positives, negatives, log_q, temperature, normalize
    )[0]
    return losses
