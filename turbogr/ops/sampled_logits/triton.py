"""sampled_logits on Triton kernels: rows are read where they are, position by position."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import triton_losses, triton_runtime
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.triton_losses import Scoring
from turbogr.ops.triton_runtime import DEVICES

BACKEND = triton_runtime.BACKEND


def _prepare(queries: Tensor, rows: Tensor, index: Tensor, temperature: float, normalize: bool) -> Scoring:
    return triton_losses.prepare(queries, rows, index, index, None, None, temperature, normalize, "fp32")


@torch_operator("sampled_logits_triton", fake=lambda queries, index: queries.new_empty(index.shape), device=DEVICES)
def _forward(queries: Tensor, rows: Tensor, index: Tensor, temperature: float, normalize: bool) -> Tensor:
    check_index("index", index, rows.shape[0])
    return triton_losses.logits_forward(_prepare(queries, rows, index, temperature, normalize))


@torch_operator(
    "sampled_logits_triton_backward",
    fake=lambda queries, rows: (queries.new_empty(queries.shape), rows.new_empty(rows.shape)),
    device=DEVICES,
)
def _backward(
    grad: Tensor, queries: Tensor, rows: Tensor, index: Tensor, temperature: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    return triton_losses.logits_backward(_prepare(queries, rows, index, temperature, normalize), grad)


set_gradient(_forward, _backward, of="queries rows")


def sampled_logits(queries: Tensor, rows: Tensor, index: Tensor, temperature: float, normalize: bool) -> Tensor:
    """See `turbogr.ops.sampled_logits.sampled_logits`."""
    logits: Tensor = _forward(queries, rows, index, temperature, normalize)
    return logits
