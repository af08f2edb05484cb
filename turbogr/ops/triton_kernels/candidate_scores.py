"""Scores of candidates that every position has for itself: sampled softmax, and logits for losses that are formulas.

A position reads the rows of its candidates where they are, in tiles of whole rows, and keeps none of them. The backward
computes the scores again, in two passes without atomics: a program owns a position (gradient of its query), then a
row of the table (the sum over the places that use it, sorted, in a fixed order). Gradients are those of the vectors of
unit length; `unit_rows_backward` makes those of the vectors themselves.

Negatives may be fp16 or int8 numbers of unit vectors, which are read as such. `row_scales` make a candidate of unit
length (fp32: its inverse length; int8: the scale of its row). Shape legend: N candidates of a tile, C columns.
"""

import triton
import triton.language as tl

from turbogr.ops.triton_kernels.tile_parts import narrow

_UNSPECIALIZED = ["num_candidates", "num_positions", "num_rows"]


@triton.jit
def load_vectors(pointer, index, there, column, width):
    """Rows `index` of a packed tensor [., width] in fp32, 0 where there is none."""
    mask = there[:, None] & (column[None, :] < width)
    return tl.load(pointer + index[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def unit_rows(
    x,
    inverse_lengths,
    narrowed,
    scales,
    num_rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Inverse lengths of rows, and the rows of unit length in FORMAT: fp16, or int8 times the row's scale."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = place < num_rows - base
    x_rc = load_vectors(x, base + place, there, column, width)
    if NORM:
        length = tl.sqrt(tl.sum(x_rc * x_rc, axis=1))
        length = tl.where(length < 1e-6, 1e-6, length)
        tl.store(inverse_lengths + base + place, 1.0 / length, mask=there)
        x_rc = x_rc / length[:, None]
    mask = there[:, None] & (column[None, :] < width)
    target = narrowed + (base + place)[:, None] * width + column[None, :]
    if FORMAT == "fp16":
        tl.store(target, x_rc.to(tl.float16), mask=mask)
    if FORMAT == "int8":
        largest = tl.max(tl.abs(x_rc), axis=1) + tl.sum(x_rc * 0.0, axis=1)  # NaN, if a number of the row is
        scale = tl.where(largest == 0.0, 1.0, largest / 127.0)
        tl.store(scales + base + place, scale, mask=there)
        # To the nearest whole number, ties to even: no bits below it are left in the sum.
        rounded = (x_rc / scale[:, None] + 12582912.0) - 12582912.0
        tl.store(target, rounded.to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def unit_rows_backward(
    x,
    inverse_lengths,
    grad,
    out,
    num_rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The gradient of x, for that of x scaled to unit length."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = place < num_rows - base
    inverse = tl.load(inverse_lengths + base + place, mask=there, other=0.0)
    unit_rc = load_vectors(x, base + place, there, column, width) * inverse[:, None]
    grad_rc = load_vectors(grad, base + place, there, column, width)
    along = tl.sum(unit_rc * grad_rc, axis=1)
    along = tl.where(inverse >= 1e6, 0.0, along)  # a vector that is divided by 1e-6 may become longer
    grad_rc = (grad_rc - unit_rc * along[:, None]) * inverse[:, None]
    mask = there[:, None] & (column[None, :] < width)
    target = out + (base + place)[:, None] * width + column[None, :]
    tl.store(target, narrow(grad_rc, out.dtype.element_ty, INTERPRETED), mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def score_candidates(
    queries,
    rows,
    narrow_rows,
    positives,
    candidates,
    log_q,
    inverse_queries,
    inverse_rows,
    row_scales,
    out,
    log_sums,
    num_candidates,
    width,
    inverse_temperature,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LOG_Q: tl.constexpr,
    LOGITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The loss [T] and the logarithms of the sums [T] of a position; with LOGITS its logits [T, num_candidates]."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    q_c = tl.load(queries + t * width + column, mask=mask, other=0.0).to(tl.float32) * inverse_temperature
    if NORM:
        q_c = q_c * tl.load(inverse_queries + t)
    own = 0.0
    positive = tl.program_id(0).to(tl.int64)
    if not LOGITS:
        positive = tl.load(positives + t).to(tl.int64)
        own = tl.sum(q_c * tl.load(rows + positive * width + column, mask=mask, other=0.0).to(tl.float32), axis=0)
        if NORM:
            own = own * tl.load(inverse_rows + positive)
        if LOG_Q:
            own -= tl.load(log_q + positive)
    largest = own
    total = own * 0.0 + 1.0
    for step in range(0, num_candidates, STEP):
        turn = step + tl.arange(0, STEP)
        there = turn < num_candidates
        index = tl.load(candidates + t * num_candidates + turn, mask=there, other=0).to(tl.int64)
        logit = tl.sum(load_vectors(narrow_rows, index, there, column, width) * q_c[None, :], axis=1)
        if SCALED:
            logit = logit * tl.load(row_scales + index, mask=there, other=0.0)
        if LOGITS:
            tl.store(out + t * num_candidates + turn, narrow(logit, out.dtype.element_ty, INTERPRETED), mask=there)
        else:
            if LOG_Q:
                logit -= tl.load(log_q + index, mask=there, other=0.0)
            logit = tl.where(there & (index != positive), logit, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logit, axis=0))
            total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(logit - new_largest), axis=0)
            largest = new_largest
    if not LOGITS:
        log_sum = largest + tl.log(total)
        tl.store(log_sums + t, log_sum)
        tl.store(out + t, narrow(log_sum - own, out.dtype.element_ty, INTERPRETED))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def candidates_backward_queries(
    grad,
    queries,
    rows,
    narrow_rows,
    positives,
    candidates,
    log_q,
    inverse_queries,
    inverse_rows,
    row_scales,
    loss,
    log_sums,
    out,
    num_candidates,
    width,
    inverse_temperature,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LOG_Q: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Gradient [T, width] fp32 of the queries of unit length; `grad` is that of the loss, or of the logits."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    q_c = tl.load(queries + t * width + column, mask=mask, other=0.0).to(tl.float32) * inverse_temperature
    if NORM:
        q_c = q_c * tl.load(inverse_queries + t)
    sum_c = tl.zeros((BLOCK,), tl.float32)
    positive = tl.program_id(0).to(tl.int64)
    log_sum = 0.0
    if not LOGITS:
        positive = tl.load(positives + t).to(tl.int64)
        log_sum = tl.load(log_sums + t)
    for step in range(0, num_candidates, STEP):
        turn = step + tl.arange(0, STEP)
        there = turn < num_candidates
        index = tl.load(candidates + t * num_candidates + turn, mask=there, other=0).to(tl.int64)
        rows_nc = load_vectors(narrow_rows, index, there, column, width)
        scale = tl.full((STEP,), 1.0, tl.float32)
        if SCALED:
            scale = tl.load(row_scales + index, mask=there, other=0.0)
        if LOGITS:
            share = tl.load(grad + t * num_candidates + turn, mask=there, other=0.0).to(tl.float32)
        else:
            logit = tl.sum(rows_nc * q_c[None, :], axis=1) * scale
            if LOG_Q:
                logit -= tl.load(log_q + index, mask=there, other=0.0)
            share = tl.where(there & (index != positive), tl.exp(logit - log_sum), 0.0)
        sum_c += tl.sum(rows_nc * (share * scale)[:, None], axis=0)
    factor = inverse_temperature
    if not LOGITS:
        share = tl.exp(-tl.load(loss + t).to(tl.float32)) - 1.0
        if NORM:
            share = share * tl.load(inverse_rows + positive)
        sum_c += share * tl.load(rows + positive * width + column, mask=mask, other=0.0).to(tl.float32)
        factor = factor * tl.load(grad + t).to(tl.float32)
    tl.store(out + t * width + column, sum_c * factor, mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def candidates_backward_rows(
    grad,
    queries,
    narrow_rows,
    positives,
    log_q,
    inverse_queries,
    row_scales,
    loss,
    log_sums,
    order,
    bounds,
    out,
    num_positions,
    num_candidates,
    width,
    inverse_temperature,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LOG_Q: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Gradient [R, width] fp32 of the rows of unit length.

    `order` and `bounds` are the places of each row (`table_rows.py`): first the positives of all positions, then their
    candidates, position by position; with LOGITS candidates alone.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    row_c = tl.load(narrow_rows + row * width + column, mask=mask, other=0.0).to(tl.float32) * inverse_temperature
    if SCALED:
        row_c = row_c * tl.load(row_scales + row)
    correction = 0.0
    if LOG_Q:
        correction = tl.load(log_q + row)
    sum_c = tl.zeros((BLOCK,), tl.float32)
    end = tl.load(bounds + tl.program_id(0) + 1)
    for step in range(tl.load(bounds + tl.program_id(0)), end, STEP):
        turn = step + tl.arange(0, STEP)
        there = turn < end
        place = tl.load(order + turn, mask=there, other=0)
        if LOGITS:
            t = (place // num_candidates).to(tl.int64)
            share = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
        else:
            is_positive = place < num_positions
            t = tl.where(is_positive, place, (place - num_positions) // tl.maximum(num_candidates, 1)).to(tl.int64)
        factor = tl.full((STEP,), 1.0, tl.float32)
        if NORM:
            factor = tl.load(inverse_queries + t, mask=there, other=0.0)
        queries_nc = load_vectors(queries, t, there, column, width)
        if not LOGITS:
            logit = tl.sum(queries_nc * row_c[None, :], axis=1) * factor - correction
            share = tl.exp(logit - tl.load(log_sums + t, mask=there, other=0.0))
            is_hit = tl.load(positives + t, mask=there, other=0).to(tl.int64) == row
            share = tl.where(is_hit, 0.0, share)
            own = tl.exp(-tl.load(loss + t, mask=there, other=0.0).to(tl.float32)) - 1.0
            share = tl.where(is_positive, own, share) * tl.load(grad + t, mask=there, other=0.0).to(tl.float32)
            share = tl.where(there, share, 0.0)
        sum_c += tl.sum(queries_nc * (share * factor)[:, None], axis=0)
    tl.store(out + row * width + column, sum_c * inverse_temperature, mask=mask)
