"""Rows of tables: look-up, the sum of gradients over the places that use a row, and the updates of rows.

Gradients of duplicates are sums over segments: `order` names the places sorted by row, and the places of row r are
order[bounds[r]] to order[bounds[r + 1] - 1], in rising order. One program owns a row, so nothing is added atomically
and the order of every sum is fixed.
"""

import triton
import triton.language as tl

from turbogr.ops.triton_kernels.random_bits import dropout_factors
from turbogr.ops.triton_kernels.tile_parts import narrow

_UNSPECIALIZED = ["num_tokens", "seed_low", "seed_high", "threshold"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def look_up(
    rows,
    index,
    position_rows,
    positions,
    key_words,
    out,
    num_tokens,
    width,
    scale,
    seed_low,
    seed_high,
    threshold,
    keep_scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EMBED: tl.constexpr,
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out = rows[index], or with EMBED dropout(rows[index] * scale + position_rows[positions]), [T, width]."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < num_tokens - base
    mask = there[:, None] & (column[None, :] < width)
    at = tl.load(index + base + place, mask=there, other=0).to(tl.int64)
    found = tl.load(rows + at[:, None] * width + column[None, :], mask=mask, other=0.0)
    if EMBED:
        position = tl.load(positions + base + place, mask=there, other=0).to(tl.int64)
        added = tl.load(position_rows + position[:, None] * width + column[None, :], mask=mask, other=0.0)
        found = found.to(tl.float32) * scale + added.to(tl.float32)
    if DROPOUT:
        found = found * dropout_factors(
            key_words + 2 * base, place, column, there, seed_low, seed_high, threshold, keep_scale
        )
    target = out + base * width + (place[:, None] * width + column[None, :])
    if EMBED:
        found = narrow(found, out.dtype.element_ty, INTERPRETED)
    tl.store(target, found, mask=mask)


@triton.jit
def sum_segment(
    grad,
    order,
    begin,
    end,
    column,
    width,
    grad_token,
    key_words,
    seed_low,
    seed_high,
    threshold,
    keep_scale,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """The sum of the gradients of one row's places, fp32 [BLOCK]; STEP places are read at once."""
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(begin, end, STEP):
        turn = step + tl.arange(0, STEP)
        there = turn < end
        place = tl.load(order + turn, mask=there, other=0)
        mask = there[:, None] & (column[None, :] < width)
        part = tl.load(grad + place.to(tl.int64)[:, None] * grad_token + column[None, :], mask=mask, other=0.0)
        part = part.to(tl.float32)
        if DROPOUT:
            part = part * dropout_factors(key_words, place, column, there, seed_low, seed_high, threshold, keep_scale)
        total += tl.sum(part, axis=0)
    return total


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def sum_duplicates(
    grad,
    order,
    bounds,
    key_words,
    out,
    width,
    grad_token,
    scale,
    seed_low,
    seed_high,
    threshold,
    keep_scale,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[r] = scale * the sum of dropout(grad) over the places of row r; a row without places is 0."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(bounds + row)
    end = tl.load(bounds + row + 1)
    total = sum_segment(
        grad, order, begin, end, column, width, grad_token, key_words,
        seed_low, seed_high, threshold, keep_scale, STEP, BLOCK, DROPOUT,
    )  # fmt: skip
    total = narrow(total * scale, out.dtype.element_ty, INTERPRETED)
    tl.store(out + row.to(tl.int64) * width + column, total, mask=column < width)


@triton.jit
def row_gradient(
    grad, order, bounds, row, column, width, grad_token, STEP: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr
):
    """A row's gradient: `grad` [R, d] has it, or it is the sum over the row's places."""
    if SUMMED:
        return tl.load(grad + row.to(tl.int64) * grad_token + column, mask=column < width, other=0.0).to(tl.float32)
    else:
        begin = tl.load(bounds + row)
        end = tl.load(bounds + row + 1)
        return sum_segment(
            grad, order, begin, end, column, width, grad_token, order, row, row, row, 1.0, STEP, BLOCK, False
        )


@triton.jit
def row_adam(
    weight,
    mean,
    square,
    index,
    grad,
    order,
    bounds,
    width,
    grad_token,
    mean_share,
    beta2,
    square_share,
    eps,
    decay,
    step_size,
    inverse_root_correction,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Adam with decoupled decay on the rows `index`, in place."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    g = row_gradient(grad, order, bounds, row, column, width, grad_token, STEP, BLOCK, SUMMED)
    at = tl.load(index + row).to(tl.int64) * width + column
    m = tl.load(mean + at, mask=mask, other=0.0)
    m = m + (g - m) * mean_share
    v = tl.load(square + at, mask=mask, other=0.0) * beta2 + g * g * square_share
    w = tl.load(weight + at, mask=mask, other=0.0) * decay
    tl.store(mean + at, m, mask=mask)
    tl.store(square + at, v, mask=mask)
    tl.store(weight + at, w - m * step_size / (tl.sqrt(v) * inverse_root_correction + eps), mask=mask)


@triton.jit
def row_adagrad(
    weight,
    square,
    index,
    grad,
    order,
    bounds,
    width,
    grad_token,
    lr,
    eps,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Adagrad on the rows `index`, in place."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    g = row_gradient(grad, order, bounds, row, column, width, grad_token, STEP, BLOCK, SUMMED)
    at = tl.load(index + row).to(tl.int64) * width + column
    s = tl.load(square + at, mask=mask, other=0.0) + g * g
    w = tl.load(weight + at, mask=mask, other=0.0)
    tl.store(square + at, s, mask=mask)
    tl.store(weight + at, w - g * lr / (tl.sqrt(s) + eps), mask=mask)
