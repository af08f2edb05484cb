"""look_up_rows on Triton kernels; the gradients of all pieces are joined and summed row by row in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import triton_passes, triton_runtime
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.triton_runtime import DEVICES

BACKEND = triton_runtime.HOST_TOO_BACKEND


def _empty_pieces(rows: Tensor, counts: list[int]) -> list[Tensor]:
    return [rows.new_empty(count, rows.shape[1]) for count in counts]


@torch_operator("look_up_rows_triton", fake=_empty_pieces, device=DEVICES)
def _forward(rows: Tensor, index: Tensor, counts: list[int]) -> list[Tensor]:
    check_index("index", index, rows.shape[0])
    return [triton_passes.look_up(rows, part) for part in index.split(counts)]


def _empty_gradient(grads: list[Tensor | None], num_rows: int, width: int) -> Tensor:
    return next(grad for grad in grads if grad is not None).new_empty(num_rows, width)


@torch_operator("look_up_rows_triton_backward", fake=_empty_gradient, device=DEVICES)
def _backward(grads: list[Tensor | None], index: Tensor, counts: list[int], num_rows: int, width: int) -> Tensor:
    given = [(grad, part) for grad, part in zip(grads, index.split(counts), strict=True) if grad is not None]
    grad, places = torch.cat([grad for grad, _ in given]), torch.cat([part for _, part in given])
    return triton_passes.sum_duplicates(grad, places, num_rows)


set_gradient(
    _forward,
    _backward,
    of="rows",
    saved=lambda rows: {"num_rows": rows.shape[0], "width": rows.shape[1]},
)


def look_up_rows(rows: Tensor, index: Tensor, counts: list[int]) -> list[Tensor]:
    """See `turbogr.ops.look_up.look_up_rows`."""
    pieces: list[Tensor] = _forward(rows, index, counts)
    return pieces
