"""Matrix products with factors rounded to bf16 and sums in fp32, on the processor's unit for bf16."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from turbogr.ops import bf16_unit, native
from turbogr.ops.native import Kernel, pointer

_kernel = Kernel(
    "bf16_gemm",
    "void *a, *b, *start, *out; int64 rows, columns, depth, a_row_stride, a_column_stride, b_row_stride, "
    "b_column_stride, start_stride, out_stride, a_narrow, b_narrow, start_narrow, out_narrow",
)

_linear_kernel = Kernel(
    "bf16_linear",
    "void *x; float *weight, *bias; void *residual, *before, **outs; int64 *widths, num_pieces, num_rows, width, "
    "columns, x_stride, weight_row_stride, weight_column_stride, residual_stride, silu",
)


def multiply(a: Tensor, b: Tensor, start: Tensor | None, out: Tensor) -> Tensor:
    """Write start + a @ b to `out` and return it, for a [m, k], b [k, n], start [n] or [m, n], each fp32 or bf16.

    Factors in fp32 are rounded to bf16. A unit must be in use (`bf16_unit.in_use() != "none"`).
    """
    assert bf16_unit.in_use() != "none", "a product in bf16 needs a unit for it"
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    if depth == 0 or out.numel() == 0:
        return out.zero_() if start is None else out.copy_(start.expand_as(out))
    assert out.stride(1) == 1 or columns <= 1, "rows of the result are contiguous"
    start = start if start is None or start.stride(-1) == 1 else start.contiguous()
    a, b = (factor if 1 in factor.stride() else factor.contiguous() for factor in (a, b))
    _kernel(
        a.data_ptr(),
        b.data_ptr(),
        pointer(start),
        out.data_ptr(),
        rows,
        columns,
        depth,
        *a.stride(),
        *b.stride(),
        start.stride(0) if start is not None and start.dim() == 2 else 0,
        out.stride(0),
        *(tensor is not None and tensor.dtype == torch.bfloat16 for tensor in (a, b, start, out)),
    )
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outs: list[Tensor],
    *,
    residual: Tensor | None = None,
    before: Tensor | None = None,
    silu: bool = False,
) -> None:
    """Write the columns of activation(x @ weight + bias + residual) to `outs`, one behind the other.

    Activations are bf16, weight and bias fp32; rows are contiguous. `before` receives what SiLU is taken of.
    """
    width, columns = weight.shape
    assert width > 0, "a weight has rows"
    weight = weight if 1 in weight.stride() else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    addresses, sizes = native.addresses(outs), native.int64s([out.shape[1] for out in outs])
    _linear_kernel(
        x.data_ptr(),
        weight.data_ptr(),
        pointer(bias),
        pointer(residual),
        pointer(before),
        ctypes.addressof(addresses),
        ctypes.addressof(sizes),
        len(outs),
        x.shape[0],
        width,
        columns,
        x.stride(0),
        *weight.stride(),
        0 if residual is None else residual.stride(0),
        silu,
    )
