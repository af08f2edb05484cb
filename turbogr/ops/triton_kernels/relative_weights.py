"""What the relative bias of HSTU needs besides attention: buckets of whole tiles, and the gradients of its two tables.

Both tables are shared by all heads, and along a diagonal of tiles the distance i - j of an element of the tile does not
change. So a program of the gradients owns a diagonal: it adds up the pairs' gradients over heads, tiles and sequences
element by element in registers. What is left to do per diagonal is to add up the tile's own diagonals, in PyTorch.
Nothing is added atomically; partial sums are added in a fixed order.
"""

import triton
import triton.language as tl

from turbogr.ops.triton_kernels.attention import weigh_pairs
from turbogr.ops.triton_kernels.tile_parts import (
    bin_entry,
    is_seen,
    load_range,
    locate_tile,
    multiply_rows,
    position_weights,
    time_distance,
)


@triton.jit(do_not_specialize=["plan_width"])
def bucket_plan(
    query_times,
    key_times,
    offsets,
    tile_sequence,
    first_tile,
    bin_boundaries,
    bin_buckets,
    plan,
    plan_width,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):
    """plan[tile of rows, tile of keys]: the bucket of all its pairs, or -1 if they may differ.

    Times need not rise: the smallest and the largest distance of a tile follow from the extremes of its times.
    """
    start, n, row, _sequence = locate_tile(tile_sequence, first_tile, offsets, BLOCK_Q)
    i = tl.minimum(row + tl.arange(0, BLOCK_Q), tl.maximum(n - 1, 0))
    times_i = tl.load(query_times + start + i, mask=i < n, other=0)
    q_low = tl.min(times_i, axis=0)
    q_high = tl.max(times_i, axis=0)
    num_tiles = (n + BLOCK_K - 1) // BLOCK_K
    for tiles in range(0, num_tiles, TILES):
        tile = tiles + tl.arange(0, TILES)
        j = tl.minimum(tile[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], n - 1)
        times_j = tl.load(key_times + start + j)
        k_low = tl.min(times_j, axis=1)
        k_high = tl.max(times_j, axis=1)
        largest = tl.maximum(q_high - k_low, k_high - q_low)
        smallest = tl.maximum(tl.maximum(q_low - k_high, k_low - q_high), 0)
        # A difference of more than 63 bits wraps around, here and in the definition.
        wraps = tl.maximum(q_high, k_high) - tl.minimum(q_low, k_low) < 0
        bucket = tl.load(bin_buckets + bin_entry(smallest, bin_boundaries))
        same = (bucket == tl.load(bin_buckets + bin_entry(largest, bin_boundaries))) & (wraps == 0)
        address = plan + tl.program_id(0).to(tl.int64) * plan_width + tile
        tl.store(address, tl.where(same, bucket, -1), mask=tile < num_tiles)


@triton.jit
def add_by_bucket(total, pairs, bucket, seen, first_weight, WEIGHTS: tl.constexpr):
    """Add the sum of a tile's pairs in every bucket to `total`, which holds WEIGHTS buckets from `first_weight` on."""
    place = tl.arange(0, WEIGHTS)
    low = tl.min(tl.min(tl.where(seen, bucket, 2147483647), axis=1), axis=0)
    high = tl.max(tl.max(tl.where(seen, bucket, -1), axis=1), axis=0)
    for b in range(tl.maximum(low, first_weight), tl.minimum(high + 1, first_weight + WEIGHTS)):
        bucket_sum = tl.sum(tl.sum(tl.where(bucket == b, pairs, 0.0), axis=1), axis=0)
        total += tl.where(place == b - first_weight, bucket_sum, 0.0)
    return total


@triton.jit(do_not_specialize=["max_len", "num_sequences", "num_heads", "num_splits", "num_diagonals", "first_weight"])
def bias_gradients(
    grad,
    q,
    k,
    v,
    offsets,
    first,
    last,
    query_times,
    key_times,
    position_weight,
    bin_boundaries,
    bin_buckets,
    time_weight,
    position_sums,
    time_sums,
    grad_token,
    grad_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    max_len,
    num_sequences,
    num_heads,
    num_splits,
    num_diagonals,
    first_weight,
    alpha,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Partial sums of HSTU's bias gradient by program: position_sums [.., BLOCK, BLOCK], time_sums [.., WEIGHTS].

    Program (diagonal, split): tiles of rows that are `diagonal` tiles below those of the keys, in every `num_splits`-th
    sequence. With ranges the diagonals above the main one come first.
    """
    program = tl.program_id(0) * num_splits + tl.program_id(1)
    diagonal = tl.program_id(0)
    if RANGES:
        diagonal = diagonal - num_diagonals // 2
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
            column = (tile - diagonal) * BLOCK
            first_i, last_i = load_range(first, last, start, row, i, n, RANGES)
            seen = is_seen(row, column, i, j, first_i, last_i, n, RANGES)
            distance = time_distance(query_times, key_times, start, row, column, i, j, n)
            bucket = tl.load(bin_buckets + bin_entry(distance, bin_boundaries))
            bias = position_weights(position_weight, row, column, i, j, seen, max_len)
            bias += tl.load(time_weight + bucket).to(tl.float32)
            pairs = tl.zeros((BLOCK, BLOCK), tl.float32)
            for head in range(num_heads):
                x = bias + alpha * multiply_rows(
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
                    BLOCK,
                    BLOCK,
                    D,
                    BLOCK_D,
                    CHUNK,
                    PRECISION,
                    INTERPRETED,
                )
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
                    BLOCK,
                    BLOCK,
                    E,
                    BLOCK_E,
                    CHUNK,
                    PRECISION,
                    INTERPRETED,
                )
                _weight, grad_x = weigh_pairs(x, grad_a, seen, 0.0, 0.0, scale, False, TANH)
                pairs += grad_x
            total += pairs
            # Looked up once more: kept, the buckets would need the registers of the products. Volatile loads are not
            # merged with the earlier ones.
            times_i = tl.load(query_times + (start + row) + i, mask=i < n - row, other=0, volatile=True)
            times_j = tl.load(key_times + (start + column) + j, mask=j < n - column, other=0, volatile=True)
            distance = tl.abs(times_i - times_j)
            bucket = tl.load(bin_buckets + bin_entry(distance, bin_boundaries))
            time_total = add_by_bucket(time_total, pairs, bucket, seen, first_weight, WEIGHTS)
    side = tl.arange(0, BLOCK)
    address = position_sums + program.to(tl.int64) * BLOCK * BLOCK + side[:, None] * BLOCK + side[None, :]
    tl.store(address, total)
    tl.store(time_sums + program.to(tl.int64) * WEIGHTS + tl.arange(0, WEIGHTS), time_total)
