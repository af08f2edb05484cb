"""embed on compiled kernels: one pass forward, and a backward that sums each row's tokens in a fixed order."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_index
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.native import DROPOUT, Kernel, dropout_arguments, pointer
from turbogr.random import Dropout

BACKEND = native.BACKEND

_forward_kernel = Kernel(
    "embed_forward",
    "float *rows; int64 *index; float *position_rows; int64 *positions, *keys; float *out; "
    f"int64 num_tokens, width; float scale; {DROPOUT}",
)
_backward_kernel = Kernel(
    "embed_backward",
    "float *grad; int64 *index, *positions, *keys; float *grad_rows, *grad_position_rows; "
    f"int64 num_tokens, width, num_rows, num_positions; float scale; {DROPOUT}",
)


@torch_operator("embed", fake=lambda rows, index: rows.new_empty(index.shape[0], rows.shape[1]))
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
    rows, position_rows = rows.contiguous(), position_rows.contiguous()
    index, positions = native.int64(index), native.int64(positions)
    keys = None if keys is None else native.int64(keys)
    num_tokens, width = index.numel(), rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    _forward_kernel(
        rows.data_ptr(),
        index.data_ptr(),
        position_rows.data_ptr(),
        positions.data_ptr(),
        pointer(keys),
        out.data_ptr(),
        num_tokens,
        width,
        scale,
        *dropout_arguments(rate, seed),
    )
    return out


def _empty_gradients(grad: Tensor, num_rows: int, num_positions: int) -> tuple[Tensor, Tensor]:
    return grad.new_empty(num_rows, grad.shape[1]), grad.new_empty(num_positions, grad.shape[1])


@torch_operator("embed_backward", fake=_empty_gradients)
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
    """A gradient with 0 rows is not computed: an empty tensor has a null address, which the kernel skips."""
    grad = grad.contiguous()
    index, positions = native.int64(index), native.int64(positions)
    keys = None if keys is None else native.int64(keys)
    grad_rows, grad_position_rows = _empty_gradients(grad, num_rows, num_positions)
    _backward_kernel(
        grad.data_ptr(),
        index.data_ptr(),
        positions.data_ptr(),
        pointer(keys),
        grad_rows.data_ptr(),
        grad_position_rows.data_ptr(),
        *grad.shape,
        num_rows,
        num_positions,
        scale,
        *dropout_arguments(rate, seed),
    )
    return grad_rows, grad_position_rows


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
