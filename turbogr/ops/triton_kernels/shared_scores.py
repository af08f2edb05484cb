"""Scores of candidates that groups of positions share, as matrix products: sampled softmax in groups, full softmax.

A program owns a tile of a group's positions, or of its candidates in the pass for their gradients, and goes over the
others. Rows are gathered inside the kernel, a chunk of their columns at a time. No tensor of scores exists, the
backward computes them again. With ALL there is one group, and its candidates are all rows. Shape legend: P positions
and N candidates of a tile.
"""

import triton
import triton.language as tl

from turbogr.ops.triton_kernels.candidate_scores import load_vectors
from turbogr.ops.triton_kernels.tile_parts import locate_tile, multiply, narrow

_UNSPECIALIZED = ["num_candidates", "num_tiles"]


@triton.jit
def candidate_index(candidates, group, turn, there, num_candidates, ALL: tl.constexpr):
    """Rows of a group's candidates `turn`."""
    if ALL:
        return turn.to(tl.int64)
    else:
        return tl.load(candidates + group.to(tl.int64) * num_candidates + turn, mask=there, other=0).to(tl.int64)


@triton.jit
def multiply_rows(
    left,
    left_index,
    left_there,
    right,
    right_index,
    right_there,
    width,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Products [M, N] of rows of one tensor with rows of another."""
    total = tl.zeros((M, N), tl.float32)
    for begin in range(0, width, CHUNK):
        column = begin + tl.arange(0, CHUNK)
        left_mc = load_vectors(left, left_index, left_there, column, width)
        right_nc = load_vectors(right, right_index, right_there, column, width)
        total += multiply(left_mc, tl.trans(right_nc), PRECISION, INTERPRETED)
    return total


@triton.jit
def load_scales(pointer, index, there, N: tl.constexpr, SCALED: tl.constexpr):
    """Factors of vectors, 1 if there are none."""
    if SCALED:
        return tl.load(pointer + index, mask=there, other=0.0)
    else:
        return tl.full((N,), 1.0, tl.float32)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def shared_forward(
    queries,
    rows,
    narrow_rows,
    positives,
    candidates,
    log_q,
    inverse_queries,
    inverse_rows,
    row_scales,
    offsets,
    tile_sequence,
    first_tile,
    loss,
    log_sums,
    num_candidates,
    width,
    inverse_temperature,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LOG_Q: tl.constexpr,
    ALL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The loss [T] of a tile of positions, and the logarithms of their sums [T]."""
    start, n, begin, group = locate_tile(tile_sequence, first_tile, offsets, BLOCK_Q)
    token = start + begin + tl.arange(0, BLOCK_Q)
    there = tl.arange(0, BLOCK_Q) < n - begin
    positive = tl.load(positives + token, mask=there, other=0).to(tl.int64)
    factor = load_scales(inverse_queries, token, there, BLOCK_Q, NORM) * inverse_temperature
    own = tl.zeros((BLOCK_Q,), tl.float32)
    for at in range(0, width, CHUNK):
        column = at + tl.arange(0, CHUNK)
        query_pc = load_vectors(queries, token, there, column, width)
        own += tl.sum(query_pc * load_vectors(rows, positive, there, column, width), axis=1)
    own = own * factor * load_scales(inverse_rows, positive, there, BLOCK_Q, NORM)
    if LOG_Q:
        own -= tl.load(log_q + positive, mask=there, other=0.0)
    largest = own
    total = tl.full((BLOCK_Q,), 1.0, tl.float32)
    count = tl.where(n > begin, num_candidates, 0)
    for step in range(0, count, BLOCK_K):
        turn = step + tl.arange(0, BLOCK_K)
        given = turn < num_candidates
        index = candidate_index(candidates, group, turn, given, num_candidates, ALL)
        logit_pn = multiply_rows(
            queries, token, there, narrow_rows, index, given, width, BLOCK_Q, BLOCK_K, CHUNK, PRECISION, INTERPRETED
        )
        logit_pn = logit_pn * factor[:, None] * load_scales(row_scales, index, given, BLOCK_K, SCALED)[None, :]
        if LOG_Q:
            logit_pn -= tl.load(log_q + index, mask=given, other=0.0)[None, :]
        logit_pn = tl.where(given[None, :] & (index[None, :] != positive[:, None]), logit_pn, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logit_pn, axis=1))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(logit_pn - new_largest[:, None]), axis=1)
        largest = new_largest
    log_sum = largest + tl.log(total)
    tl.store(log_sums + token, log_sum, mask=there)
    tl.store(loss + token, narrow(log_sum - own, loss.dtype.element_ty, INTERPRETED), mask=there)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def shared_backward_queries(
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
    offsets,
    tile_sequence,
    first_tile,
    loss,
    log_sums,
    out,
    num_candidates,
    width,
    inverse_temperature,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LOG_Q: tl.constexpr,
    ALL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """OUT columns of the gradient [T, width] fp32 of the queries of unit length, of a tile of positions."""
    start, n, begin, group = locate_tile(tile_sequence, first_tile, offsets, BLOCK_Q)
    token = start + begin + tl.arange(0, BLOCK_Q)
    there = tl.arange(0, BLOCK_Q) < n - begin
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    positive = tl.load(positives + token, mask=there, other=0).to(tl.int64)
    factor = load_scales(inverse_queries, token, there, BLOCK_Q, NORM) * inverse_temperature
    log_sum = tl.load(log_sums + token, mask=there, other=0.0)
    total_po = tl.zeros((BLOCK_Q, OUT), tl.float32)
    count = tl.where(n > begin, num_candidates, 0)
    for step in range(0, count, BLOCK_K):
        turn = step + tl.arange(0, BLOCK_K)
        given = turn < num_candidates
        index = candidate_index(candidates, group, turn, given, num_candidates, ALL)
        scale = load_scales(row_scales, index, given, BLOCK_K, SCALED)
        logit_pn = multiply_rows(
            queries, token, there, narrow_rows, index, given, width, BLOCK_Q, BLOCK_K, CHUNK, PRECISION, INTERPRETED
        )
        logit_pn = logit_pn * factor[:, None] * scale[None, :]
        if LOG_Q:
            logit_pn -= tl.load(log_q + index, mask=given, other=0.0)[None, :]
        share_pn = tl.exp(logit_pn - log_sum[:, None]) * scale[None, :]
        share_pn = tl.where(given[None, :] & (index[None, :] != positive[:, None]), share_pn, 0.0)
        row_no = load_vectors(narrow_rows, index, given, column, width)
        total_po += multiply(share_pn, row_no, PRECISION, INTERPRETED)
    own = tl.exp(-tl.load(loss + token, mask=there, other=0.0).to(tl.float32)) - 1.0
    own = own * load_scales(inverse_rows, positive, there, BLOCK_Q, NORM)
    total_po += own[:, None] * load_vectors(rows, positive, there, column, width)
    total_po = total_po * (tl.load(grad + token, mask=there, other=0.0).to(tl.float32) * inverse_temperature)[:, None]
    mask = there[:, None] & (column[None, :] < width)
    tl.store(out + token[:, None] * width + column[None, :], total_po, mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def shared_backward_rows(
    grad,
    queries,
    narrow_rows,
    positives,
    candidates,
    log_q,
    inverse_queries,
    row_scales,
    offsets,
    log_sums,
    out,
    num_candidates,
    num_tiles,
    width,
    inverse_temperature,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LOG_Q: tl.constexpr,
    ALL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """OUT columns of the gradient [G * num_candidates, width] fp32 of each group's candidates, of unit length."""
    group = tl.program_id(0) // num_tiles
    turn = tl.program_id(0) % num_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    given = turn < num_candidates
    index = candidate_index(candidates, group, turn, given, num_candidates, ALL)
    scale = load_scales(row_scales, index, given, BLOCK_K, SCALED) * inverse_temperature
    correction = tl.zeros((BLOCK_K,), tl.float32)
    if LOG_Q:
        correction = tl.load(log_q + index, mask=given, other=0.0)
    column = tl.program_id(1) * OUT + tl.arange(0, OUT)
    total_no = tl.zeros((BLOCK_K, OUT), tl.float32)
    end = tl.load(offsets + group + 1)
    for begin in range(tl.load(offsets + group), end, BLOCK_Q):
        token = begin + tl.arange(0, BLOCK_Q)
        there = token < end
        factor = load_scales(inverse_queries, token, there, BLOCK_Q, NORM)
        logit_np = multiply_rows(
            narrow_rows, index, given, queries, token, there, width, BLOCK_K, BLOCK_Q, CHUNK, PRECISION, INTERPRETED
        )
        logit_np = logit_np * scale[:, None] * factor[None, :] - correction[:, None]
        share_np = tl.exp(logit_np - tl.load(log_sums + token, mask=there, other=0.0)[None, :])
        positive = tl.load(positives + token, mask=there, other=-1).to(tl.int64)
        is_scored = there[None, :] & given[:, None] & (index[:, None] != positive[None, :])
        weight = tl.load(grad + token, mask=there, other=0.0).to(tl.float32) * factor
        share_np = tl.where(is_scored, share_np * weight[None, :], 0.0)
        query_po = load_vectors(queries, token, there, column, width)
        total_no += multiply(share_np, query_po, PRECISION, INTERPRETED)
    place = group.to(tl.int64) * num_candidates + turn
    mask = given[:, None] & (column[None, :] < width)
    tl.store(out + place[:, None] * width + column[None, :], total_no * inverse_temperature, mask=mask)
