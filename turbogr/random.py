"""Counter-based random numbers: every draw is a hash of (seed, key, column).

Dropout masks and negatives are functions of what they belong to, not of a generator's state. The same token gets the
same numbers whatever the number of threads, the grouping into batches or the number of processes, and a resumed run
needs no saved generator. The compiled kernels compute the same function (`csrc/random.h`), bit for bit.

A key is any int64 (we use the index of the event in the store); a column is a small non-negative integer.
Integers hold unsigned 32-bit words in int64 tensors, so that plain PyTorch can do the arithmetic.

PyTorch is imported where it is used: preparing a log needs `mix64` alone and starts a second sooner without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN32 = 0x9E3779B9
GOLDEN64 = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the usual step between inputs of `mix64`."""

LARGEST_BOUND = 2**31 - 1
"""The largest `bound` that `random_integers` accepts."""


class Dropout(NamedTuple):
    """Drop each element with probability `rate`, decided by `seed` and the element's key and column."""

    rate: float
    seed: int


def derive_seed(seed: int, *parts: int) -> int:
    """Fold integers into a seed: an independent-looking 63-bit seed for every different sequence of parts."""
    state = 0
    for part in (seed, *parts):  # the seed is mixed like a part: added to one, (0, 1) would be (1, 0)
        state = mix64((state + GOLDEN64 + (part & _MASK64)) & _MASK64)
    return state >> 1


@overload
def mix64(x: int) -> int: ...
@overload
def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]: ...
def mix64(x: Any) -> Any:
    """The finaliser of SplitMix64: a bijection of 64-bit words whose every output bit depends on every input bit.

    `x` is an int in [0, 2**64) or a NumPy array of uint64.
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def random_words(keys: Tensor, seed: int, num_columns: int) -> Tensor:
    """Uniform 32-bit words for `keys` [T] int64: a tensor [T, num_columns] int64 with values in [0, 2**32)."""
    import torch

    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    first = _mix32(_mix32((keys & _MASK32) ^ low) ^ ((keys >> 32) & _MASK32))
    second = _mix32((_mix32(first ^ high) + _GOLDEN32) & _MASK32)
    columns = torch.arange(num_columns, device=keys.device) * _GOLDEN32
    return _mix32((first[:, None] + columns) & _MASK32) ^ second[:, None]


def random_integers(keys: Tensor, seed: int, num_columns: int, bound: int) -> Tensor:
    """Integers in [0, bound) for `keys` [T]: [T, num_columns] int32; the bias is below bound / 2**64."""
    if not 0 < bound < 2**31:
        raise ValueError(f"bound must be between 1 and 2**31 - 1, got {bound}")
    words = random_words(keys, seed, 2 * num_columns)
    high, low = words[:, 0::2], words[:, 1::2]
    return ((high * bound + ((low * bound) >> 32)) >> 32).int()


def dropout_threshold(rate: float) -> int:
    """Elements whose word is below this are dropped."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"a dropout rate must be at least 0 and below 1, got {rate}")
    return round(rate * 2**32)


def apply_dropout(x: Tensor, dropout: Dropout | None, keys: Tensor | None) -> Tensor:
    """Drop elements of `x` [T, width] and scale the kept ones by 1 / (1 - rate); `keys` [T] name the rows."""
    if dropout is None or dropout.rate == 0.0:
        return x
    if keys is None:
        raise ValueError("dropout needs the keys of the rows")
    keep = random_words(keys, dropout.seed, x.shape[1]) >= dropout_threshold(dropout.rate)
    return x * (keep.to(x.dtype) / (1.0 - dropout.rate))


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words whose every output bit depends on every input bit."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
