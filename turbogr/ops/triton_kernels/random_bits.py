"""Random words of `turbogr/random.py` in registers, bit for bit, by operations on 32 bits alone.

A key is read as two words, the lower one first: `key_words` is a vector of int64 keys seen as int32. Seeds come as two
words too, and thresholds as one, each as the int32 of the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """A bijection of 32-bit words whose every output bit depends on every input bit."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_words(key_words, row, mask, seed_low, seed_high):
    """What the words of all columns of the rows start from: two words a row; `key_words` points to row 0."""
    low = tl.load(key_words + 2 * row, mask=mask, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(key_words + 2 * row + 1, mask=mask, other=0).to(tl.uint32, bitcast=True)
    first = mix(mix(low ^ seed_low.to(tl.uint32, bitcast=True)) ^ high)
    second = mix(mix(first ^ seed_high.to(tl.uint32, bitcast=True)) + 0x9E3779B9)
    return first, second


@triton.jit
def random_words(first, second, column):
    """Words of columns, from those that their rows start from."""
    return mix(first + column.to(tl.uint32) * 0x9E3779B9) ^ second


@triton.jit
def dropout_factors(key_words, row, column, mask, seed_low, seed_high, threshold, keep_scale):
    """Factors [rows, columns] of dropout: 0 or keep_scale; `mask` says which of the rows there are."""
    first, second = row_words(key_words, row, mask, seed_low, seed_high)
    words = random_words(first[:, None], second[:, None], column[None, :])
    return tl.where(words >= threshold.to(tl.uint32, bitcast=True), keep_scale, 0.0)


@triton.jit
def multiply_high(a, b):
    """The upper word of a product of two words, from products of their halves."""
    a_low = a & 0xFFFF
    a_high = a >> 16
    b_low = b & 0xFFFF
    b_high = b >> 16
    across = a_low * b_high
    also = a_high * b_low
    middle = ((a_low * b_low) >> 16) + (across & 0xFFFF) + (also & 0xFFFF)
    return a_high * b_high + (across >> 16) + (also >> 16) + (middle >> 16)


@triton.jit(do_not_specialize=["num_rows", "num_columns", "seed_low", "seed_high", "bound"])
def random_integers(
    key_words,
    out,
    num_rows,
    num_columns,
    seed_low,
    seed_high,
    bound,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Integers in [0, bound), [T, num_columns] int32: words 2c and 2c + 1 of a key as 64 bits, times the bound."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    place = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < num_rows - base
    first, second = row_words(key_words + 2 * base, place, there, seed_low, seed_high)
    high = random_words(first[:, None], second[:, None], 2 * column[None, :])
    low = random_words(first[:, None], second[:, None], 2 * column[None, :] + 1)
    limit = bound.to(tl.uint32, bitcast=True) + tl.zeros((ROWS, BLOCK), tl.uint32)
    carried = multiply_high(low, limit)
    lower = high * limit + carried
    drawn = multiply_high(high, limit) + (lower < carried).to(tl.uint32)
    target = out + base * num_columns + (place[:, None] * num_columns + column[None, :])
    tl.store(target, drawn.to(tl.int32, bitcast=True), mask=there[:, None] & (column[None, :] < num_columns))
