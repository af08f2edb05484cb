"""Sums over what was before, for many events and groups at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.vocabulary import Int64Array

Floats = NDArray[np.float64]


def running_sums(keys: Int64Array, moments: Int64Array, values: NDArray[Any]) -> Floats:
    """Return for every row the sums [n, C] of `values` [n, C] of the rows with its key and a strictly smaller moment.

    Whole numbers are summed exactly, whatever the order of the rows.
    """
    if not len(keys):
        return np.zeros(values.shape)
    order = np.lexsort((moments, keys))
    key, moment = keys[order], moments[order]
    new_key = np.r_[True, key[1:] != key[:-1]]
    first = np.flatnonzero(new_key | np.r_[True, moment[1:] != moment[:-1]])
    before = np.zeros((len(keys) + 1, values.shape[1]))
    np.cumsum(values[order], axis=0, out=before[1:])
    of_key = before[np.maximum.accumulate(np.where(new_key, np.arange(len(keys)), 0))]
    of_moment = before[np.repeat(first, np.diff(first, append=len(keys)))]
    sums = np.empty(values.shape, np.float64)
    sums[order] = of_moment - of_key
    return sums


def first_of_runs(*columns: Int64Array) -> Int64Array:
    """Return for every row the first of the adjacent rows that are equal to it in all columns."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
