"""FuXi's channels of position and time. Content is attention without a bias (`attention.py`), written beside them.

The weights of both channels are the same for all heads, so a program takes a chunk of the columns of *all* heads'
values and makes a pair's weights once for the whole chunk. Time is a table over buckets, or a decay a · γ^(x^β) with x
in days (`DECAY`). The output is [T, h, channels * e], position and time first.
"""

import triton
import triton.language as tl

from turbogr.ops.triton_kernels.relative_weights import add_by_bucket
from turbogr.ops.triton_kernels.tile_parts import (
    bin_entry,
    bucket_weights,
    decay_parts,
    is_seen,
    keys_of_rows,
    load_range,
    locate_tile,
    multiply,
    narrow,
    position_weights,
    rows_of_keys,
    time_distance,
)

_UNSPECIALIZED = ["max_len", "plan_width", "width"]


@triton.jit
def time_weights(
    query_times,
    key_times,
    start,
    row,
    key,
    i,
    j,
    n,
    time_weight,
    bin_boundaries,
    bin_weights,
    plan,
    entry,
    DECAY: tl.constexpr,
):
    """Weight of every pair by its distance in time; `entry` is the place of the tile in the plan of buckets."""
    if DECAY:
        _log_days, _power, base = decay_parts(query_times, key_times, start, row, key, i, j, n, time_weight)
        return tl.load(time_weight).to(tl.float32) * base
    else:
        bucket = tl.load(plan + entry)
        return bucket_weights(
            bucket, query_times, key_times, start, row, key, i, j, n, bin_boundaries, bin_weights, time_weight
        )


@triton.jit
def channel_columns(column, head_stride, E: tl.constexpr):
    """Offset of a value's column, counted over all heads, in the position channel of the output."""
    return column // E * head_stride + column % E


@triton.jit
def load_channel(pointer, start, begin, n, token_stride, columns, column, width, ROWS: tl.constexpr):
    """ROWS rows from `begin` on; `columns` are the columns' offsets, `column` their numbers, below `width`."""
    place = tl.arange(0, ROWS)[:, None]
    base = pointer + (start + begin) * token_stride
    mask = (place < n - begin) & (column[None, :] < width)
    return tl.load(base + (place * token_stride + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def store_channel(
    pointer,
    value,
    start,
    begin,
    n,
    token_stride,
    columns,
    column,
    width,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The opposite of `load_channel`."""
    place = tl.arange(0, ROWS)[:, None]
    base = pointer + (start + begin) * token_stride
    mask = (place < n - begin) & (column[None, :] < width)
    value = narrow(value, pointer.dtype.element_ty, INTERPRETED)
    tl.store(base + (place * token_stride + columns[None, :]), value, mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def channels_forward(
    v,
    out,
    offsets,
    tile_sequence,
    first_tile,
    first,
    last,
    query_times,
    key_times,
    position_weight,
    time_weight,
    bin_boundaries,
    bin_weights,
    plan,
    v_token,
    out_token,
    out_head,
    width,
    max_len,
    plan_width,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DECAY: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Both channels of a tile of rows and a chunk of the `width` columns of v."""
    start, n, row, _sequence = locate_tile(tile_sequence, first_tile, offsets, BLOCK_Q)
    i = tl.arange(0, BLOCK_Q)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    first_i, last_i = load_range(first, last, start, row, i[:, None], n, RANGES)
    by_position = tl.zeros((BLOCK_Q, CHUNK), tl.float32)
    by_time = tl.zeros((BLOCK_Q, CHUNK), tl.float32)
    begin, steps, own_begin, own_steps = keys_of_rows(first, last, start, row, n, BLOCK_Q, BLOCK_K, RANGES)
    for step in range(steps + own_steps):
        key = tl.where(step < steps, begin + step * BLOCK_K, own_begin + (step - steps) * BLOCK_K)
        j = tl.arange(0, BLOCK_K)
        v_kc = load_channel(v, start, key, n, v_token, column, column, width, BLOCK_K)
        seen = is_seen(row, key, i[:, None], j[None, :], first_i, last_i, n, RANGES)
        weight = position_weights(position_weight, row, key, i[:, None], j[None, :], seen, max_len)
        by_position += multiply(narrow(weight, v.dtype.element_ty, INTERPRETED), v_kc, PRECISION, INTERPRETED)
        entry = tl.program_id(0).to(tl.int64) * plan_width + key // BLOCK_K
        weight = time_weights(
            query_times,
            key_times,
            start,
            row,
            key,
            i[:, None],
            j[None, :],
            n,
            time_weight,
            bin_boundaries,
            bin_weights,
            plan,
            entry,
            DECAY,
        )
        weight = tl.where(seen, weight, 0.0)
        by_time += multiply(narrow(weight, v.dtype.element_ty, INTERPRETED), v_kc, PRECISION, INTERPRETED)
    columns = channel_columns(column, out_head, E)
    store_channel(out, by_position, start, row, n, out_token, columns, column, width, BLOCK_Q, INTERPRETED)
    store_channel(out + E, by_time, start, row, n, out_token, columns, column, width, BLOCK_Q, INTERPRETED)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def channels_backward_values(
    grad,
    grad_v,
    offsets,
    tile_sequence,
    first_tile,
    first_row_tile,
    first,
    last,
    query_times,
    key_times,
    position_weight,
    time_weight,
    bin_boundaries,
    bin_weights,
    plan,
    grad_token,
    grad_head,
    width,
    max_len,
    plan_width,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DECAY: tl.constexpr,
    RANGES: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """grad_v [T, width] fp32, packed, of a tile of keys and a chunk of columns; with ADD on top of what it holds."""
    start, n, key, sequence = locate_tile(tile_sequence, first_tile, offsets, BLOCK_K)
    j = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    columns = channel_columns(column, grad_head, E)
    total = tl.zeros((BLOCK_K, CHUNK), tl.float32)
    begin, steps, own_begin, own_steps = rows_of_keys(first, last, start, key, n, BLOCK_Q, BLOCK_K, RANGES)
    for step in range(steps + own_steps):
        row = tl.where(step < steps, begin + step * BLOCK_Q, own_begin + (step - steps) * BLOCK_Q)
        i = tl.arange(0, BLOCK_Q)
        first_i, last_i = load_range(first, last, start, row, i[None, :], n, RANGES)
        seen = is_seen(row, key, i[None, :], j[:, None], first_i, last_i, n, RANGES)
        grad_qc = load_channel(grad, start, row, n, grad_token, columns, column, width, BLOCK_Q)
        weight = position_weights(position_weight, row, key, i[None, :], j[:, None], seen, max_len)
        total += multiply(narrow(weight, grad.dtype.element_ty, INTERPRETED), grad_qc, PRECISION, INTERPRETED)
        entry = (tl.load(first_row_tile + sequence) + row // BLOCK_Q).to(tl.int64) * plan_width + key // BLOCK_K
        weight = time_weights(
            query_times,
            key_times,
            start,
            row,
            key,
            i[None, :],
            j[:, None],
            n,
            time_weight,
            bin_boundaries,
            bin_weights,
            plan,
            entry,
            DECAY,
        )
        weight = tl.where(seen, weight, 0.0)
        grad_qc = load_channel(grad + E, start, row, n, grad_token, columns, column, width, BLOCK_Q)
        total += multiply(narrow(weight, grad.dtype.element_ty, INTERPRETED), grad_qc, PRECISION, INTERPRETED)
    if ADD:
        total += load_channel(grad_v, start, key, n, width.to(tl.int64), column, column, width, BLOCK_K)
    store_channel(grad_v, total, start, key, n, width.to(tl.int64), column, column, width, BLOCK_K, INTERPRETED)


@triton.jit(do_not_specialize=["width", "max_len", "num_sequences", "num_splits", "num_diagonals", "first_weight"])
def channel_weight_gradients(
    grad,
    v,
    offsets,
    first,
    last,
    query_times,
    key_times,
    time_weight,
    bin_boundaries,
    bin_buckets,
    position_sums,
    time_sums,
    grad_token,
    grad_head,
    v_token,
    width,
    num_sequences,
    num_splits,
    num_diagonals,
    first_weight,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    DECAY: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Partial sums of the gradients of both channels' weights, as `bias_gradients` makes those of HSTU's.

    With DECAY the first three of WEIGHTS are the gradients of a, β and γ.
    """
    program = tl.program_id(0) * num_splits + tl.program_id(1)
    diagonal = tl.program_id(0)
    if RANGES:
        diagonal = diagonal - num_diagonals // 2
    place = tl.arange(0, WEIGHTS)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    time_total = tl.zeros((WEIGHTS,), tl.float32)
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    for sequence in range(tl.program_id(1), num_sequences, num_splits):
        start = tl.load(offsets + sequence)
        n = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
        tiles = (n + BLOCK - 1) // BLOCK
        for tile in range(tl.maximum(diagonal, 0), tl.minimum(tiles, tiles + diagonal)):
            row = tile * BLOCK
            key = (tile - diagonal) * BLOCK
            first_i, last_i = load_range(first, last, start, row, i, n, RANGES)
            seen = is_seen(row, key, i, j, first_i, last_i, n, RANGES)
            of_position = tl.zeros((BLOCK, BLOCK), tl.float32)
            of_time = tl.zeros((BLOCK, BLOCK), tl.float32)
            for begin in range(0, width, CHUNK):
                column = begin + tl.arange(0, CHUNK)
                columns = channel_columns(column, grad_head, E)
                v_kc = load_channel(v, start, key, n, v_token, column, column, width, BLOCK)
                grad_qc = load_channel(grad, start, row, n, grad_token, columns, column, width, BLOCK)
                of_position += multiply(grad_qc, tl.trans(v_kc), PRECISION, INTERPRETED)
                grad_qc = load_channel(grad + E, start, row, n, grad_token, columns, column, width, BLOCK)
                of_time += multiply(grad_qc, tl.trans(v_kc), PRECISION, INTERPRETED)
            total += tl.where(seen, of_position, 0.0)
            of_time = tl.where(seen, of_time, 0.0)
            if DECAY:
                log_days, power, base = decay_parts(query_times, key_times, start, row, key, i, j, n, time_weight)
                amplitude = tl.load(time_weight).to(tl.float32)
                gamma = tl.load(time_weight + 2).to(tl.float32)
                of_time = of_time * base
                sum_a = tl.sum(tl.sum(of_time, axis=1), axis=0)
                of_time = of_time * amplitude * power
                sum_gamma = tl.sum(tl.sum(of_time, axis=1), axis=0) / gamma
                # ln of x and of γ are those in base 2 times ln 2.
                factor = 0.4804530139182014 * tl.log2(gamma)
                sum_beta = tl.sum(tl.sum(of_time * log_days, axis=1), axis=0) * factor
                time_total += tl.where(place == 0, sum_a, tl.where(place == 1, sum_beta, 0.0))
                time_total += tl.where(place == 2, sum_gamma, 0.0)
            else:
                distance = time_distance(query_times, key_times, start, row, key, i, j, n)
                bucket = tl.load(bin_buckets + bin_entry(distance, bin_boundaries))
                time_total = add_by_bucket(time_total, of_time, bucket, seen, first_weight, WEIGHTS)
    side = tl.arange(0, BLOCK)
    address = position_sums + program.to(tl.int64) * BLOCK * BLOCK + side[:, None] * BLOCK + side[None, :]
    tl.store(address, total)
    tl.store(time_sums + program.to(tl.int64) * WEIGHTS + tl.arange(0, WEIGHTS), time_total)
