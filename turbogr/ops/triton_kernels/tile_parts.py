"""Parts that the kernels of jagged attention share: which tile a program owns, which pairs it sees, biases.

A program owns a tile of tokens of one sequence. `i` are positions of queries, `j` of keys within the tile, counted from
its first `row` and `column`. They have an axis of size 1 (`i[:, None]`, `j[None, :]` or the other way round), so that
the same code serves tiles [queries, keys] and [keys, queries]. Base offsets are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """a @ b summed in fp32. Triton's interpreter would multiply the bits of bf16, so there they are widened."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def narrow(x, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """x rounded to TYPE. Triton's interpreter cuts bf16 off, so there the rounding is added first."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 32767 + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def locate_tile(tile_sequence, first_tile, offsets, BLOCK: tl.constexpr):
    """First token and length of this program's sequence, and where in it its tile begins; length 0 without a tile."""
    tile = tl.program_id(0)
    sequence = tl.load(tile_sequence + tile)
    is_tile = sequence >= 0
    sequence = tl.maximum(sequence, 0)
    start = tl.load(offsets + sequence)
    stop = tl.load(offsets + sequence + 1)
    n = tl.where(is_tile, stop - start, 0).to(tl.int32)
    begin = (tile - tl.load(first_tile + sequence)) * BLOCK
    return start, n, begin, sequence


@triton.jit
def load_rows(
    pointer, start, begin, n, token_stride, column, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS rows of a sequence from `begin` on, from column `column` on: [ROWS, BLOCK], 0 beyond n tokens and WIDTH.

    The base is 64 bits wide and the same for the whole tile, so that the offsets within the tile need only 32.
    """
    place = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    base = pointer + (start + begin) * token_stride + column
    mask = place[:, None] < n - begin
    if WIDTH != BLOCK:
        mask = mask & (columns[None, :] < WIDTH)
    return tl.load(base + (place[:, None] * token_stride + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def multiply_rows(
    left,
    left_begin,
    left_token,
    left_column,
    right,
    right_begin,
    right_token,
    right_column,
    start,
    n,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Products [LEFT, RIGHT] of rows of two tensors of a sequence, CHUNK columns at a time.

    Only the chunk's operands need registers. Operands that a loop keeps take more of them than there are with wide
    heads, three products in place of one, or a bias beside them.
    """
    total = tl.zeros((LEFT, RIGHT), tl.float32)
    for at in range(0, BLOCK, CHUNK):
        left_c = load_columns(left, start, left_begin, n, left_token, left_column, at, LEFT, WIDTH, BLOCK, CHUNK)
        right_c = load_columns(right, start, right_begin, n, right_token, right_column, at, RIGHT, WIDTH, BLOCK, CHUNK)
        total += multiply(left_c, tl.trans(right_c), PRECISION, INTERPRETED)
    return total


@triton.jit
def load_columns(
    pointer,
    start,
    begin,
    n,
    token_stride,
    column,
    at,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """CHUNK columns, from the one numbered `at` on, of what `load_rows` loads."""
    place = tl.arange(0, ROWS)
    columns = tl.arange(0, CHUNK)
    base = pointer + (start + begin) * token_stride + (column + at)
    mask = place[:, None] < n - begin
    if WIDTH != BLOCK:
        mask = mask & (columns[None, :] < WIDTH - at)
    return tl.load(base + (place[:, None] * token_stride + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def store_rows(
    pointer,
    value,
    start,
    begin,
    n,
    token_stride,
    column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The opposite of `load_rows`, rounded to the type of the tensor."""
    place = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    base = pointer + (start + begin) * token_stride + column
    mask = place[:, None] < n - begin
    if WIDTH != BLOCK:
        mask = mask & (columns[None, :] < WIDTH)
    value = narrow(value, pointer.dtype.element_ty, INTERPRETED)
    tl.store(base + (place[:, None] * token_stride + columns[None, :]), value, mask=mask)


@triton.jit
def load_tokens(pointer, start, begin, place, n):
    """Numbers of the tokens begin + place of a sequence, 0 behind it."""
    return tl.load(pointer + (start + begin) + place, mask=place < n - begin, other=0)


@triton.jit
def plan_steps(low, high, own_begin, n, OWN: tl.constexpr, STEP: tl.constexpr):
    """The tiles of STEP tokens that hold [low, high) and the program's own OWN tokens from `own_begin`.

    Two runs of tiles: the first tile and the number of tiles of each. The second is empty where one run holds all.
    """
    low = low // STEP * STEP
    own_low = own_begin // STEP * STEP
    own_high = tl.minimum((own_begin + OWN + STEP - 1) // STEP * STEP, n)
    touching = (high >= own_low) & (low <= own_high)
    own_steps = tl.where(touching, 0, (own_high - own_low + STEP - 1) // STEP)
    low = tl.where(touching, tl.minimum(low, own_low), low)
    high = tl.where(touching, tl.maximum(high, own_high), high)
    steps = tl.maximum((high - low + STEP - 1) // STEP, 0)
    return low, steps, own_low, tl.maximum(own_steps, 0)


@triton.jit
def keys_of_rows(first, last, start, row, n, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RANGES: tl.constexpr):
    """The tiles of keys that the rows of a tile see, as `plan_steps` returns them."""
    if RANGES:
        place = tl.arange(0, BLOCK_Q)
        first_i = load_tokens(first, start, row, place, n).to(tl.int32)
        last_i = load_tokens(last, start, row, place, n).to(tl.int32)
        some = first_i < last_i
        low = tl.min(tl.where(some, first_i, n), axis=0)
        high = tl.max(tl.where(some, last_i, 0), axis=0)
    else:
        low = 0
        high = tl.minimum(row + BLOCK_Q, n)
    return plan_steps(low, high, row, n, BLOCK_Q, BLOCK_K)


@triton.jit
def rows_of_keys(first, last, start, column, n, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RANGES: tl.constexpr):
    """The tiles of rows that see a key of a tile, as `plan_steps` returns them."""
    if RANGES:
        CHUNK: tl.constexpr = 128
        low = tl.full((CHUNK,), 0, tl.int32) + n
        high = tl.full((CHUNK,), 0, tl.int32)
        for chunk in range(0, n, CHUNK):
            i = chunk + tl.arange(0, CHUNK)
            first_i = load_tokens(first, start, chunk, i - chunk, n).to(tl.int32)
            last_i = load_tokens(last, start, chunk, i - chunk, n).to(tl.int32)
            some = (tl.maximum(first_i, column) < tl.minimum(last_i, column + BLOCK_K)) & (i < n)
            low = tl.minimum(low, tl.where(some, i, n))
            high = tl.maximum(high, tl.where(some, i + 1, 0))
        begin = tl.min(low, axis=0)
        end = tl.max(high, axis=0)
    else:
        begin = column
        end = n
    return plan_steps(begin, end, column, n, BLOCK_K, BLOCK_Q)


@triton.jit
def is_seen(row, column, i, j, first_i, last_i, n, RANGES: tl.constexpr):
    """Whether query row + i sees key column + j, for tokens of the sequence and padding behind it."""
    if RANGES:
        key = column + j
        seen = ((key >= first_i) & (key < last_i)) | (row + i == key)
        return seen & (i < n - row) & (key < n)
    else:
        return (j - i <= row - column) & (i < n - row)


@triton.jit
def load_range(first, last, start, row, i, n, RANGES: tl.constexpr):
    """The keys that queries row + i see; two tensors that are not read where attention is causal."""
    if RANGES:
        first_i = load_tokens(first, start, row, i, n).to(tl.int32)
        last_i = load_tokens(last, start, row, i, n).to(tl.int32)
    else:
        first_i = i
        last_i = i
    return first_i, last_i


@triton.jit
def position_weights(position_weight, row, column, i, j, seen, max_len):
    """Weight of every pair by its distance in positions."""
    base = position_weight + (max_len - 1 + column - row)
    return tl.load(base + (j - i), mask=seen, other=0.0).to(tl.float32)


@triton.jit
def time_distance(query_times, key_times, start, row, column, i, j, n):
    """Seconds between the time of query row + i and that of key column + j, int64."""
    return tl.abs(load_tokens(query_times, start, row, i, n) - load_tokens(key_times, start, column, j, n))


@triton.jit
def time_bin(distance):
    """Exponent and three bits of the mantissa of a distance: a bin that holds at most one boundary of buckets."""
    bits = distance.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum((bits >> 20) - 1016, 0)


@triton.jit
def bin_entry(distance, bin_boundaries):
    """Index into the tables by bin: two entries a bin, the second from the bin's boundary on."""
    bin = time_bin(distance)
    return 2 * bin + (distance >= tl.load(bin_boundaries + bin)).to(tl.int32)


@triton.jit
def bucket_weights(
    bucket, query_times, key_times, start, row, column, i, j, n, bin_boundaries, bin_weights, time_weight
):
    """Weight of every pair of a tile by its bucket; `bucket` is that of the whole tile, -1 if it has several."""
    if bucket >= 0:
        weight = tl.load(time_weight + bucket).to(tl.float32) + (i + j).to(tl.float32) * 0.0
    else:
        distance = time_distance(query_times, key_times, start, row, column, i, j, n)
        weight = tl.load(bin_weights + bin_entry(distance, bin_boundaries)).to(tl.float32)
    return weight


@triton.jit
def decay_parts(query_times, key_times, start, row, column, i, j, n, decay):
    """Of every pair's weight a · γ^(x^β): log2 x, x^β and γ^(x^β), with x in days."""
    distance = time_distance(query_times, key_times, start, row, column, i, j, n)
    log_days = tl.log2((1 + distance).to(tl.float32) * (1.0 / 86400.0))
    power = tl.exp2(tl.load(decay + 1).to(tl.float32) * log_days)
    log_base = tl.log2(tl.load(decay + 2).to(tl.float32))
    return log_days, power, tl.exp2(log_base * power)


@triton.jit
def sigmoid(x, TANH: tl.constexpr):
    """By exponential and reciprocal, or by the one instruction that NVIDIA has for tanh: 11 bits, enough for bf16."""
    if TANH:
        half = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], dtype=tl.float32, is_pure=True, pack=1
        )
        return 0.5 * half + 0.5
    else:
        return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))
