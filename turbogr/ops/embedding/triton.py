"""embed on Triton kernels: one pass forward, and a backward that sums each row's tokens in a fixed order."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import triton_passes, triton_runtime
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.norm_linear.cpu import strided_rows
from turbogr.ops.triton_passes import dropout_words, sum_duplicates
from turbogr.ops.triton_runtime import DEVICES
from turbogr.random import Dropout

BACKEND = triton_runtime.HOST_TOO_BACKEND


@torch_operator("embed_triton", fake=lambda rows, index: rows.new_empty(index.shape[0], rows.shape[1]), device=DEVICES)
def _forward(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor,
    positions: Tensor,
    keys: Tensor | None,
    scale: float,
    rate: float,
    seed: int,
) -> Tensor:
    check_index("index", index, rows.shape[0])
    check_index("positions", positions, position_rows.shape[0])
    drop = dropout_words(keys, rate, seed, rows)
    return triton_passes.look_up(rows, index, position_rows, positions, scale, drop)


def _empty_gradients(grad: Tensor, num_rows: int, num_positions: int) -> tuple[Tensor, Tensor]:
    return grad.new_empty(num_rows, grad.shape[1]), grad.new_empty(num_positions, grad.shape[1])


@torch_operator("embed_triton_backward", fake=_empty_gradients, device=DEVICES)
def _backward(
    grad: Tensor,
    index: Tensor,
    positions: Tensor,
    keys: Tensor | None,
    num_rows: int,
    num_positions: int,
    scale: float,
    rate: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    grad = strided_rows(grad)
    drop = dropout_words(keys, rate, seed, grad)
    grad_rows = sum_duplicates(grad, index, num_rows, scale, drop)
    return grad_rows, sum_duplicates(grad, positions, num_positions, 1.0, drop)


def _sizes(rows: Tensor, position_rows: Tensor, needs_rows: bool, needs_position_rows: bool) -> dict[str, int]:
    return {
        "num_rows": rows.shape[0] if needs_rows else 0,
        "num_positions": position_rows.shape[0] if needs_position_rows else 0,
    }


set_gradient(_forward, _backward, of="rows position_rows", saved=_sizes)


def embed(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor,
    positions: Tensor,
    scale: float,
    dropout: Dropout | None,
    keys: Tensor | None,
) -> Tensor:
    """See `turbogr.ops.embedding.embed`."""
    rate, seed = dropout or (0.0, 0)
    out: Tensor = _forward(rows, index, position_rows, positions, keys, scale, rate, seed)
    return out
