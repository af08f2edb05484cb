"""sampled_logits on compiled kernels: rows are read where they are, position by position."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import Kernel, pointer

BACKEND = native.BACKEND

_forward_kernel = Kernel(
    "sampled_logits_forward",
    "float *queries, *rows; int32 *index; float *inverse_queries, *inverse_rows, *logits; int64 num_positions, "
    "num_indices, num_rows, width; float inverse_temperature",
)
_backward_kernel = Kernel(
    "sampled_logits_backward",
    "float *grad, *queries, *rows; int32 *index; float *inverse_queries, *inverse_rows, *grad_queries, *grad_rows; "
    "int64 num_positions, num_indices, num_rows, width; float inverse_temperature",
)


def _outputs(queries: Tensor, rows: Tensor, index: Tensor, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and the inverse norms of queries and rows."""
    return (
        queries.new_empty(index.shape),
        queries.new_empty(queries.shape[0] if normalize else 0),
        queries.new_empty(rows.shape[0] if normalize else 0),
    )


@torch_operator("sampled_logits", fake=_outputs, outputs="logits inverse_queries inverse_rows")
def _forward(
    queries: Tensor, rows: Tensor, index: Tensor, temperature: float, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_index("index", index, rows.shape[0])
    queries, rows, index = queries.contiguous(), rows.contiguous(), native.int32(index)
    outputs = _outputs(queries, rows, index, normalize)
    if index.numel() == 0:
        return outputs
    logits, inverse_queries, inverse_rows = outputs
    _forward_kernel(
        queries.data_ptr(),
        rows.data_ptr(),
        index.data_ptr(),
        pointer(inverse_queries if normalize else None),
        pointer(inverse_rows if normalize else None),
        logits.data_ptr(),
        *index.shape,
        *rows.shape,
        1 / temperature,
    )
    return outputs


@torch_operator(
    "sampled_logits_backward", fake=lambda queries, rows: (queries.new_empty(queries.shape), rows.new_empty(rows.shape))
)
def _backward(
    grad: Tensor,
    queries: Tensor,
    rows: Tensor,
    index: Tensor,
    inverse_queries: Tensor,
    inverse_rows: Tensor,
    temperature: float,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    if index.numel() == 0:
        return torch.zeros_like(queries), torch.zeros_like(rows)
    grad, queries, rows, index = grad.contiguous(), queries.contiguous(), rows.contiguous(), native.int32(index)
    grad_queries, grad_rows = torch.empty_like(queries), torch.empty_like(rows)
    _backward_kernel(
        grad.data_ptr(),
        queries.data_ptr(),
        rows.data_ptr(),
        index.data_ptr(),
        pointer(inverse_queries if normalize else None),
        pointer(inverse_rows if normalize else None),
        grad_queries.data_ptr(),
        grad_rows.data_ptr(),
        *index.shape,
        *rows.shape,
        1 / temperature,
    )
    return grad_queries, grad_rows


set_gradient(_forward, _backward, of="queries rows")


def sampled_logits(queries: Tensor, rows: Tensor, index: Tensor, temperature: float, normalize: bool) -> Tensor:
    """See `turbogr.ops.sampled_logits.sampled_logits`."""
    logits: Tensor = _forward(queries, rows, index, temperature, normalize)[0]
    return logits
