"""Index arithmetic on many ranges at once: offsets, concatenation, cutting by a budget, counting."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.vocabulary import Int64Array


def offsets_of(lengths: NDArray[np.integer[Any]]) -> Int64Array:
    """Return the offsets [n + 1] of consecutive ranges with `lengths` [n]: range k is offsets[k]:offsets[k + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def cut_by_budget(offsets: Int64Array, budget: int) -> Int64Array:
    """Cut consecutive ranges into pieces of at most `budget` values: piece k is the ranges bounds[k]:bounds[k + 1].

    `offsets` [n + 1] ascend; range i holds offsets[i + 1] - offsets[i] values. Every piece takes as many ranges as fit,
    and one that is larger than the budget is a piece alone. Returns `bounds` [pieces + 1], from 0 to n.
    """
    last = len(offsets) - 1
    bounds = [0]
    while bounds[-1] < last:
        first = bounds[-1]
        fits = int(np.searchsorted(offsets, offsets[first] + budget, side="right")) - 1
        bounds.append(max(fits, first + 1))
    return np.array(bounds, np.int64)


def concatenated_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return starts[0], starts[0] + 1, ... for lengths[0] values, then those of starts[1], and so on."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def add_counts(counts: Int64Array, rows: NDArray[np.integer[Any]]) -> None:
    """Add to `counts` [n] how often each of 0..n - 1 occurs in `rows`; cheap also where n is far larger."""
    if len(counts) > len(rows):
        np.add.at(counts, rows.astype(np.int64), 1)  # other types take NumPy's slow path
    else:
        counts += np.bincount(rows, minlength=len(counts))
