"""What items and users have had of each action so far: counts and rates at any time, from the log itself.

A rate at a time counts events before that time alone, so a training event never counts itself. The counts of items
stop at the end of training, as a model that is trained once knows no later ones; those of users go on, as their history
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array

_PRIOR = 10.0
"""Events with the mean of all that a rate begins with."""


class ActionCounts:
    """Counts of `actions` by item and by user of a store; `until` is the time from which items' events do not count.

    `means` and deviations of the actions are `statistics`; those of binary actions are 0.
    """

    def __init__(
        self, store: Store, actions: Sequence[str], statistics: Mapping[str, tuple[float, float]], until: int
    ) -> None:
        self.until = until
        self._statistics = [statistics[name] for name in actions]
        times = np.asarray(store.times, np.int64)
        self._first_time, latest = (int(times.min()), int(times.max())) if len(times) else (0, 0)
        self._span = latest - self._first_time + 2
        values = [np.asarray(store.features[f"action.{name}"].values, np.float64) for name in actions]
        users = np.repeat(np.arange(store.num_users), store.lengths)
        self._of_users = _Running(self._keys(users, times), values)
        early = times < until
        items = np.asarray(store.items, np.int64)[early]
        self._of_items = _Running(self._keys(items, times[early]), [column[early] for column in values])

    @staticmethod
    def width(actions: Sequence[str]) -> int:
        """Floats per event: of its item and of its user, the number of events and a rate per action."""
        return 2 * (1 + len(actions))

    def floats(self, users: Int64Array, items: Int64Array, times: Int64Array) -> NDArray[np.float32]:
        """Return what is known before `times` [T] of `users` and `items` [T]; row -1 has had nothing. [T, width]"""
        of_items = self._of_items.at(self._keys(items, np.minimum(times, self.until)), self._keys(items, 0))
        of_users = self._of_users.at(self._keys(users, times), self._keys(users, 0))
        known = [np.where(rows >= 0, found, 0) for rows, found in ((items, of_items), (users, of_users))]
        floats = np.concatenate([self._as_floats(found) for found in known], axis=0)
        return np.ascontiguousarray(floats.T, np.float32)

    def _as_floats(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """From events, and known ones and sum per action, to floats of about unit size."""
        columns = [np.log1p(counts[0]) / 3]
        for number, (mean, std) in enumerate(self._statistics):
            known, total = counts[1 + 2 * number], counts[2 + 2 * number]
            rate = (total + _PRIOR * mean) / (known + _PRIOR)
            columns.append((rate - mean) / std if std else _logit(rate) - _logit(np.array(mean)))
        return np.stack(columns)

    def _keys(self, rows: Int64Array, times: Int64Array | int) -> Int64Array:
        """Return one number per row and time, in the order of rows, then times."""
        since = np.clip(np.asarray(times) - self._first_time if np.ndim(times) else 0, 0, self._span - 1)
        keys: Int64Array = np.maximum(rows, 0) * self._span + since
        return keys


class _Running:
    """Sums over sorted keys up to any key."""

    def __init__(self, keys: Int64Array, values: Sequence[NDArray[np.float64]]) -> None:
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._sums = [np.zeros(len(keys) + 1) for _ in range(2 * len(values))]
        for number, column in enumerate(values):
            known = ~np.isnan(column[order])
            np.cumsum(known, out=self._sums[2 * number][1:])
            np.cumsum(np.where(known, column[order], 0), out=self._sums[2 * number + 1][1:])

    def at(self, keys: Int64Array, starts: Int64Array) -> NDArray[np.float64]:
        """Return how many keys lie in starts <= key < keys, and the sums over them, [1 + sums, T]."""
        first, last = np.searchsorted(self._keys, starts), np.searchsorted(self._keys, keys)
        return np.stack([(last - first).astype(np.float64), *(sums[last] - sums[first] for sums in self._sums)])


def _logit(rate: NDArray[np.float64]) -> NDArray[np.float64]:
    rate = np.clip(rate, 1e-4, 1 - 1e-4)
    return np.log(rate / (1 - rate))
