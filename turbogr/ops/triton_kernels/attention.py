"""Jagged attention forward and backward: SiLU with or without a relative bias (HSTU, FuXi's content), and softmax.

The backward makes two passes without atomics, one that owns keys (grad_k, grad_v) and one that owns rows (grad_q).
Both recompute the scores: seven products in place of five, and the same bits in every run. The gradients of the bias
tables are a pass of their own (`relative_weights.py`).

Programs: tiles of one size in every sequence x heads. Shape legend: Q queries and K keys of a tile, D and E the sizes
of a head of q and k, and of v.
"""

import triton
import triton.language as tl

from turbogr.ops.triton_kernels.tile_parts import (
    bucket_weights,
    is_seen,
    keys_of_rows,
    load_range,
    load_rows,
    locate_tile,
    multiply,
    multiply_rows,
    narrow,
    position_weights,
    rows_of_keys,
    sigmoid,
    store_rows,
)

_UNSPECIALIZED = ["max_len", "plan_width"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_forward(
    q,
    k,
    v,
    out,
    log_sums,
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
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    max_len,
    plan_width,
    alpha,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out_i = scale * sum_j SiLU(alpha q_i k_j + bias_ij) v_j; or softmax in place of SiLU, and `log_sums` [T, h]."""
    start, n, row, _sequence = locate_tile(tile_sequence, first_tile, offsets, BLOCK_Q)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_Q)
    if CHUNK == 0:
        q_qd = load_rows(q, start, row, n, q_token, head * q_head, BLOCK_Q, D, BLOCK_D)
    first_i, last_i = load_range(first, last, start, row, i[:, None], n, RANGES)
    total = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((BLOCK_Q,), tl.float32)
    begin, steps, own_begin, own_steps = keys_of_rows(first, last, start, row, n, BLOCK_Q, BLOCK_K, RANGES)
    for step in range(steps + own_steps):
        column = tl.where(step < steps, begin + step * BLOCK_K, own_begin + (step - steps) * BLOCK_K)
        j = tl.arange(0, BLOCK_K)
        if CHUNK == 0:
            k_kd = load_rows(k, start, column, n, k_token, head * k_head, BLOCK_K, D, BLOCK_D)
            v_ke = load_rows(v, start, column, n, v_token, head * v_head, BLOCK_K, E, BLOCK_E)
        seen = is_seen(row, column, i[:, None], j[None, :], first_i, last_i, n, RANGES)
        x = 0.0
        if BIAS:  # before the products: while it is looked up, their fragments need no registers
            bucket = tl.load(plan + tl.program_id(0).to(tl.int64) * plan_width + column // BLOCK_K)
            x = bucket_weights(
                bucket,
                query_times,
                key_times,
                start,
                row,
                column,
                i[:, None],
                j[None, :],
                n,
                bin_boundaries,
                bin_weights,
                time_weight,
            )
            x += position_weights(position_weight, row, column, i[:, None], j[None, :], seen, max_len)
        if CHUNK == 0:
            x += multiply(q_qd, tl.trans(k_kd), PRECISION, INTERPRETED) * alpha
        else:
            x += alpha * multiply_rows(
                q,
                row,
                q_token,
                head * q_head,
                k,
                column,
                k_token,
                head * k_head,
                start,
                n,
                BLOCK_Q,
                BLOCK_K,
                D,
                BLOCK_D,
                CHUNK,
                PRECISION,
                INTERPRETED,
            )
        if SOFTMAX:
            x = tl.where(seen, x, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(x, axis=1))
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            shrink = tl.exp2((largest - base) * 1.4426950408889634)
            a = tl.exp2((x - base[:, None]) * 1.4426950408889634)
            weight_sum = weight_sum * shrink + tl.sum(a, axis=1)
            total = total * shrink[:, None]
            largest = new_largest
        else:
            a = tl.where(seen, x * sigmoid(x, TANH), 0.0)
        if CHUNK != 0:
            v_ke = load_rows(v, start, column, n, v_token, head * v_head, BLOCK_K, E, BLOCK_E)
        total += multiply(narrow(a, v.dtype.element_ty, INTERPRETED), v_ke, PRECISION, INTERPRETED)
    if SOFTMAX:
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weight_sum = tl.where(i < n - row, weight_sum, 1.0)
        total = total / weight_sum[:, None]
        num_heads = tl.num_programs(1)
        tl.store(log_sums + (start + row + i) * num_heads + head, base + tl.log(weight_sum), mask=i < n - row)
    else:
        total = total * scale
    store_rows(out, total, start, row, n, out_token, head * out_head, BLOCK_Q, E, BLOCK_E, INTERPRETED)


@triton.jit
def weigh_pairs(
    x,
    grad_a,
    seen,
    log_sum,
    delta,
    scale,
    SOFTMAX: tl.constexpr,
    TANH: tl.constexpr,
):
    """Weights of a tile's pairs and the gradient of their scores."""
    if SOFTMAX:
        a = tl.where(seen, tl.exp2((x - log_sum) * 1.4426950408889634), 0.0)
        grad_x = a * (grad_a - delta)
    else:
        s = sigmoid(x, TANH)
        a = tl.where(seen, x * s * scale, 0.0)
        grad_x = tl.where(seen, grad_a * scale * s * (1.0 + x * (1.0 - s)), 0.0)
    return a, grad_x


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_backward_keys(
    grad,
    q,
    k,
    v,
    grad_k,
    grad_v,
    log_sums,
    deltas,
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
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    max_len,
    plan_width,
    alpha,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """grad_k and grad_v [T, h, .], packed, of a tile of keys: a loop over the rows that see them. Tiles are [K, Q]."""
    start, n, column, sequence = locate_tile(tile_sequence, first_tile, offsets, BLOCK_K)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    j = tl.arange(0, BLOCK_K)
    if CHUNK == 0:
        k_kd = load_rows(k, start, column, n, k_token, head * k_head, BLOCK_K, D, BLOCK_D)
        v_ke = load_rows(v, start, column, n, v_token, head * v_head, BLOCK_K, E, BLOCK_E)
    total_k = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    total_v = tl.zeros((BLOCK_K, BLOCK_E), tl.float32)
    begin, steps, own_begin, own_steps = rows_of_keys(first, last, start, column, n, BLOCK_Q, BLOCK_K, RANGES)
    for step in range(steps + own_steps):
        row = tl.where(step < steps, begin + step * BLOCK_Q, own_begin + (step - steps) * BLOCK_Q)
        i = tl.arange(0, BLOCK_Q)
        if CHUNK == 0:
            q_qd = load_rows(q, start, row, n, q_token, head * q_head, BLOCK_Q, D, BLOCK_D)
            grad_qe = load_rows(grad, start, row, n, grad_token, head * grad_head, BLOCK_Q, E, BLOCK_E)
        first_i, last_i = load_range(first, last, start, row, i[None, :], n, RANGES)
        seen = is_seen(row, column, i[None, :], j[:, None], first_i, last_i, n, RANGES)
        x = 0.0
        if BIAS:
            tile = tl.load(first_row_tile + sequence) + row // BLOCK_Q
            bucket = tl.load(plan + tile.to(tl.int64) * plan_width + column // BLOCK_K)
            x = bucket_weights(
                bucket,
                query_times,
                key_times,
                start,
                row,
                column,
                i[None, :],
                j[:, None],
                n,
                bin_boundaries,
                bin_weights,
                time_weight,
            )
            x += position_weights(position_weight, row, column, i[None, :], j[:, None], seen, max_len)
        if CHUNK == 0:
            x += multiply(k_kd, tl.trans(q_qd), PRECISION, INTERPRETED) * alpha
            grad_a = multiply(v_ke, tl.trans(grad_qe), PRECISION, INTERPRETED)
        else:
            x += alpha * multiply_rows(
                k,
                column,
                k_token,
                head * k_head,
                q,
                row,
                q_token,
                head * q_head,
                start,
                n,
                BLOCK_K,
                BLOCK_Q,
                D,
                BLOCK_D,
                CHUNK,
                PRECISION,
                INTERPRETED,
            )
            grad_a = multiply_rows(
                v,
                column,
                v_token,
                head * v_head,
                grad,
                row,
                grad_token,
                head * grad_head,
                start,
                n,
                BLOCK_K,
                BLOCK_Q,
                E,
                BLOCK_E,
                CHUNK,
                PRECISION,
                INTERPRETED,
            )
        log_sum = 0.0
        delta = 0.0
        if SOFTMAX:
            log_sum = tl.load(log_sums + (start + row + i) * num_heads + head, mask=i < n - row, other=0.0)[None, :]
            delta = tl.load(deltas + (start + row + i) * num_heads + head, mask=i < n - row, other=0.0)[None, :]
        a, grad_x = weigh_pairs(x, grad_a, seen, log_sum, delta, scale, SOFTMAX, TANH)
        if CHUNK != 0:
            grad_qe = load_rows(grad, start, row, n, grad_token, head * grad_head, BLOCK_Q, E, BLOCK_E)
        total_v += multiply(narrow(a, v.dtype.element_ty, INTERPRETED), grad_qe, PRECISION, INTERPRETED)
        if CHUNK != 0:
            q_qd = load_rows(q, start, row, n, q_token, head * q_head, BLOCK_Q, D, BLOCK_D)
        total_k += multiply(narrow(grad_x, q.dtype.element_ty, INTERPRETED), q_qd, PRECISION, INTERPRETED)
    store_rows(grad_k, total_k * alpha, start, column, n, num_heads * D, head * D, BLOCK_K, D, BLOCK_D, INTERPRETED)
    store_rows(grad_v, total_v, start, column, n, num_heads * E, head * E, BLOCK_K, E, BLOCK_E, INTERPRETED)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attention_backward_rows(
    grad,
    q,
    k,
    v,
    grad_q,
    log_sums,
    deltas,
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
    grad_token,
    grad_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    max_len,
    plan_width,
    alpha,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """grad_q [T, h, d], packed, of a tile of rows: a loop over the keys that they see."""
    start, n, row, _sequence = locate_tile(tile_sequence, first_tile, offsets, BLOCK_Q)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    i = tl.arange(0, BLOCK_Q)
    if CHUNK == 0:
        q_qd = load_rows(q, start, row, n, q_token, head * q_head, BLOCK_Q, D, BLOCK_D)
        grad_qe = load_rows(grad, start, row, n, grad_token, head * grad_head, BLOCK_Q, E, BLOCK_E)
    first_i, last_i = load_range(first, last, start, row, i[:, None], n, RANGES)
    log_sum = 0.0
    delta = 0.0
    if SOFTMAX:
        log_sum = tl.load(log_sums + (start + row + i) * num_heads + head, mask=i < n - row, other=0.0)[:, None]
        delta = tl.load(deltas + (start + row + i) * num_heads + head, mask=i < n - row, other=0.0)[:, None]
    total = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    begin, steps, own_begin, own_steps = keys_of_rows(first, last, start, row, n, BLOCK_Q, BLOCK_K, RANGES)
    for step in range(steps + own_steps):
        column = tl.where(step < steps, begin + step * BLOCK_K, own_begin + (step - steps) * BLOCK_K)
        j = tl.arange(0, BLOCK_K)
        if CHUNK == 0:
            k_kd = load_rows(k, start, column, n, k_token, head * k_head, BLOCK_K, D, BLOCK_D)
            v_ke = load_rows(v, start, column, n, v_token, head * v_head, BLOCK_K, E, BLOCK_E)
        seen = is_seen(row, column, i[:, None], j[None, :], first_i, last_i, n, RANGES)
        x = 0.0
        if BIAS:
            bucket = tl.load(plan + tl.program_id(0).to(tl.int64) * plan_width + column // BLOCK_K)
            x = bucket_weights(
                bucket,
                query_times,
                key_times,
                start,
                row,
                column,
                i[:, None],
                j[None, :],
                n,
                bin_boundaries,
                bin_weights,
                time_weight,
            )
            x += position_weights(position_weight, row, column, i[:, None], j[None, :], seen, max_len)
        if CHUNK == 0:
            x += multiply(q_qd, tl.trans(k_kd), PRECISION, INTERPRETED) * alpha
        else:
            x += alpha * multiply_rows(
                q,
                row,
                q_token,
                head * q_head,
                k,
                column,
                k_token,
                head * k_head,
                start,
                n,
                BLOCK_Q,
                BLOCK_K,
                D,
                BLOCK_D,
                CHUNK,
                PRECISION,
                INTERPRETED,
            )
        if CHUNK == 0:
            grad_a = multiply(grad_qe, tl.trans(v_ke), PRECISION, INTERPRETED)
        else:
            grad_a = multiply_rows(
                grad,
                row,
                grad_token,
                head * grad_head,
                v,
                column,
                v_token,
                head * v_head,
                start,
                n,
                BLOCK_Q,
                BLOCK_K,
                E,
                BLOCK_E,
                CHUNK,
                PRECISION,
                INTERPRETED,
            )
        _weight, grad_x = weigh_pairs(x, grad_a, seen, log_sum, delta, scale, SOFTMAX, TANH)
        if CHUNK != 0:
            k_kd = load_rows(k, start, column, n, k_token, head * k_head, BLOCK_K, D, BLOCK_D)
        total += multiply(narrow(grad_x, k.dtype.element_ty, INTERPRETED), k_kd, PRECISION, INTERPRETED)
    store_rows(grad_q, total * alpha, start, row, n, num_heads * D, head * D, BLOCK_Q, D, BLOCK_D, INTERPRETED)
