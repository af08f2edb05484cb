"""What stands before and after the library's matrix products: norms, gates, dropout, activation functions, residuals.

Each kernel goes over the rows once and keeps everything in fp32 registers. Where a norm is involved a program has whole
rows; the others take blocks of columns. Rows may be strided. Shape legend: R rows of a program, C columns.
"""

import triton
import triton.language as tl

from turbogr.ops.triton_kernels.random_bits import dropout_factors
from turbogr.ops.triton_kernels.tile_parts import narrow, sigmoid

_UNSPECIALIZED = ["num_rows", "seed_low", "seed_high", "threshold"]


@triton.jit
def load_tile(pointer, base, place, column, mask, stride):
    """Elements of rows base + place in fp32, 0 outside the mask. The base is 64 bits wide, offsets in the tile 32."""
    return tl.load(pointer + base * stride + (place[:, None] * stride + column[None, :]), mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def store_tile(pointer, value, base, place, column, mask, stride, INTERPRETED: tl.constexpr):
    """The opposite of `load_tile`, rounded to the type of the tensor."""
    value = narrow(value, pointer.dtype.element_ty, INTERPRETED)
    tl.store(pointer + base * stride + (place[:, None] * stride + column[None, :]), value, mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def normalize_rows(
    x,
    gate,
    key_words,
    out,
    moments,
    num_rows,
    width,
    x_token,
    gate_token,
    seed_low,
    seed_high,
    threshold,
    keep_scale,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out = dropout(gate * norm(x)) [T, width]; `moments` [2, T]: mean and inverse deviation of each row of x."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = place < num_rows - base
    mask = there[:, None] & (column[None, :] < width)
    y_rc = load_tile(x, base, place, column, mask, x_token)
    if NORM != "none":
        mean = tl.zeros((ROWS,), tl.float32)
        if NORM == "layer":
            mean = tl.sum(y_rc, axis=1) / width
            y_rc = tl.where(mask, y_rc - mean[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(y_rc * y_rc, axis=1) / width + eps)
        y_rc = y_rc * inverse[:, None]
        tl.store(moments + base + place, mean, mask=there)
        tl.store(moments + num_rows + base + place, inverse, mask=there)
    if GATED:
        y_rc = y_rc * load_tile(gate, base, place, column, mask, gate_token)
    if DROPOUT:
        y_rc = y_rc * dropout_factors(
            key_words + 2 * base, place, column, there, seed_low, seed_high, threshold, keep_scale
        )
    store_tile(out, y_rc, base, place, column, mask, width, INTERPRETED)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def normalize_rows_backward(
    grad,
    x,
    gate,
    residual_grad,
    key_words,
    moments,
    grad_x,
    grad_gate,
    out,
    num_rows,
    width,
    x_token,
    gate_token,
    residual_token,
    seed_low,
    seed_high,
    threshold,
    keep_scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of x and of the gate, and `out` once more: the left side of the product whose weight has a gradient.

    `grad` is packed and may be `out`. With RESIDUAL the gradient of x has `residual_grad` added.
    """
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = place < num_rows - base
    mask = there[:, None] & (column[None, :] < width)
    grad_rc = load_tile(grad, base, place, column, mask, width)
    y_rc = load_tile(x, base, place, column, mask, x_token)
    inverse = tl.zeros((ROWS,), tl.float32)
    if NORM != "none":
        mean = tl.load(moments + base + place, mask=there, other=0.0)
        inverse = tl.load(moments + num_rows + base + place, mask=there, other=0.0)
        y_rc = tl.where(mask, (y_rc - mean[:, None]) * inverse[:, None], 0.0)
    left_rc = y_rc
    if DROPOUT:
        factors = dropout_factors(
            key_words + 2 * base, place, column, there, seed_low, seed_high, threshold, keep_scale
        )
        grad_rc = grad_rc * factors
        left_rc = left_rc * factors
    if GATED:
        gate_rc = load_tile(gate, base, place, column, mask, gate_token)
        left_rc = left_rc * gate_rc
        store_tile(grad_gate, grad_rc * y_rc, base, place, column, mask, width, INTERPRETED)
        grad_rc = grad_rc * gate_rc
    if NORM != "none":
        share = tl.sum(grad_rc * y_rc, axis=1) / width
        inner = grad_rc - y_rc * share[:, None]
        if NORM == "layer":
            inner = inner - (tl.sum(grad_rc, axis=1) / width)[:, None]
        grad_rc = inner * inverse[:, None]
    if RESIDUAL:
        grad_rc += load_tile(residual_grad, base, place, column, mask, residual_token)
    store_tile(grad_x, grad_rc, base, place, column, mask, width, INTERPRETED)
    store_tile(out, left_rc, base, place, column, mask, width, INTERPRETED)


@triton.jit
def load_bias(bias, column, width, BIAS: tl.constexpr):
    """The bias of the columns in fp32 [1, C], or 0."""
    if BIAS:
        return tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    else:
        return 0.0


@triton.jit(do_not_specialize=["num_rows"])
def activate(
    x,
    bias,
    residual,
    out,
    num_rows,
    width,
    x_token,
    residual_token,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out = residual + SiLU(x + bias), [T, width]; each part if it is asked for."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < num_rows - base)[:, None] & (column[None, :] < width)
    z_rc = load_tile(x, base, place, column, mask, x_token) + load_bias(bias, column, width, BIAS)
    if SILU:
        z_rc = z_rc * sigmoid(z_rc, False)
    if RESIDUAL:
        z_rc += load_tile(residual, base, place, column, mask, residual_token)
    store_tile(out, z_rc, base, place, column, mask, width, INTERPRETED)


@triton.jit(do_not_specialize=["num_rows"])
def activate_backward(
    grad,
    x,
    bias,
    out,
    num_rows,
    width,
    grad_token,
    x_token,
    out_token,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out = grad * SiLU'(x + bias), or without SiLU a copy of grad."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < num_rows - base)[:, None] & (column[None, :] < width)
    grad_rc = load_tile(grad, base, place, column, mask, grad_token)
    if SILU:
        z_rc = load_tile(x, base, place, column, mask, x_token) + load_bias(bias, column, width, BIAS)
        s = sigmoid(z_rc, False)
        grad_rc = grad_rc * s * (1.0 + z_rc * (1.0 - s))
    store_tile(out, grad_rc, base, place, column, mask, out_token, INTERPRETED)


@triton.jit(do_not_specialize=["num_rows"])
def gate_by_silu(gate, up, out, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """out = SiLU(gate) * up; all packed [T, width]."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < num_rows - base)[:, None] & (column[None, :] < width)
    a_rc = load_tile(gate, base, place, column, mask, width)
    b_rc = load_tile(up, base, place, column, mask, width)
    store_tile(out, a_rc * sigmoid(a_rc, False) * b_rc, base, place, column, mask, width, INTERPRETED)


@triton.jit(do_not_specialize=["num_rows"])
def gate_by_silu_backward(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    out,
    num_rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of both factors, and `out` once more, which may be `grad`; all packed [T, width]."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < num_rows - base)[:, None] & (column[None, :] < width)
    grad_rc = load_tile(grad, base, place, column, mask, width)
    a_rc = load_tile(gate, base, place, column, mask, width)
    b_rc = load_tile(up, base, place, column, mask, width)
    s = sigmoid(a_rc, False)
    silu = a_rc * s
    store_tile(grad_up, grad_rc * silu, base, place, column, mask, width, INTERPRETED)
    slope = s * (1.0 + a_rc * (1.0 - s))
    store_tile(grad_gate, grad_rc * b_rc * slope, base, place, column, mask, width, INTERPRETED)
    store_tile(out, silu * b_rc, base, place, column, mask, width, INTERPRETED)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def drop_elements(
    x,
    key_words,
    out,
    num_rows,
    width,
    x_token,
    seed_low,
    seed_high,
    threshold,
    keep_scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out = x with elements dropped and the kept ones scaled, [T, width]."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < num_rows - base
    mask = there[:, None] & (column[None, :] < width)
    x_rc = load_tile(x, base, place, column, mask, x_token)
    factors = dropout_factors(key_words + 2 * base, place, column, there, seed_low, seed_high, threshold, keep_scale)
    store_tile(out, x_rc * factors, base, place, column, mask, width, INTERPRETED)
