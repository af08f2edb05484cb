"""Index arithmetic on many ranges at once."""

from __future__ import annotations

import numpy as np

from turbogr.data.vocabulary import Int64Array


def concatenated_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return starts[0], starts[0] + 1, ... for lengths[0] values, then those of starts[1], and so on."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)
