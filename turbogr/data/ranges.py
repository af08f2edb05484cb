"""Index arithmetic on many ranges and rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.vocabulary import Int64Array


def concatenated_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return starts[0], starts[0] + 1, ... for lengths[0] values, then those of starts[1], and so on."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def add_counts(counts: Int64Array, rows: NDArray[np.integer[Any]]) -> None:
    """Add to `counts` [n] how often each of 0..n - 1 occurs in `rows`; cheap also where n is far larger."""
    if len(counts) > len(rows):
        np.add.at(counts, rows.astype(np.int64), 1)  # other types take numpy's slow path
    else:
        counts += np.bincount(rows, minlength=len(counts))
