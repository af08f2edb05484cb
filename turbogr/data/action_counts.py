"""What has been done before, as inputs of a model: how often, and the rate of each action, by item, user and category.

The groups are items, users, users with the same item, and for every category of events and items its values, and users
with the same value. A rate at a time counts events before that time alone, so a training event never counts itself.
What everybody did stops counting at the end of training, as a model that is trained once knows nothing later; what the
user did goes on, as the history does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.ranges import offsets_of
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array

_PRIOR = 10.0
"""Events with the mean of all, or of the user, that a rate begins with."""
_LONGEST_GAP = 30 * 86400.0

Floats = NDArray[np.float64]


class Values(NamedTuple):
    """A category of T tokens: rows of its table `codes` [T], or with `lengths` [T] any number per token."""

    codes: Int64Array
    lengths: Int64Array | None = None


class ActionCounts:
    """Counts of `actions` in a store by groups; `columns` are categories of events and items, by name.

    `statistics` are mean and deviation of the actions, 0 of binary ones. `until` is the time from which events of
    others do not count; an event counts after `delay` seconds.
    """

    def __init__(
        self,
        store: Store,
        actions: Sequence[str],
        columns: Mapping[str, FeatureColumn],
        statistics: Mapping[str, tuple[float, float]],
        until: int,
        delay: int = 0,
    ) -> None:
        self.until, self.delay = until, delay
        self._statistics = [statistics[name] for name in actions]
        times = np.asarray(store.times, np.int64)
        self._first_time, latest = (int(times.min()), int(times.max())) if len(times) else (0, 0)
        self._span = latest - self._first_time + 2
        self._num_items = store.num_items
        values = [np.asarray(store.features[f"action.{name}"].values, np.float64) for name in actions]
        users = np.repeat(np.arange(store.num_users), store.lengths)
        items = np.asarray(store.items, np.int64)
        early = times < until
        self._groups = {
            "item": self._group(items[early], times[early], [column[early] for column in values]),
            "user": self._group(users, times, values),
            "user x item": self._group(users * self._num_items + items, times, values),
        }
        self._sizes: dict[str, int] = {}
        for name, column in columns.items():
            rows = items if column.owner == "item" else np.arange(len(items))
            if column.info.kind == "category":
                codes, events = column.table_rows(rows), np.arange(len(items))
            else:
                codes, lengths = column.table_row_lists(rows)
                events = np.repeat(np.arange(len(items)), lengths)
            self._sizes[name] = column.info.num_rows
            crossed = users[events] * column.info.num_rows + codes
            of_events = [found[events] for found in values]
            self._groups[f"user x {name}"] = self._group(crossed, times[events], of_events)
            kept = early[events]
            self._groups[name] = self._group(codes[kept], times[events][kept], [found[kept] for found in of_events])

    @staticmethod
    def width(num_actions: int, num_columns: int) -> int:
        """Floats per token: of every group the number of events and a rate per action, and of the user's last event."""
        return (3 + 2 * num_columns) * (1 + num_actions) + 2

    def floats(
        self, users: Int64Array, items: Int64Array, times: Int64Array, values: Mapping[str, Values]
    ) -> NDArray[np.float32]:
        """Return what is known before `times` [T] of `users`, `items` and categories [T]; row -1 has had nothing."""
        last = self._groups["user"].newest(users, times, users >= 0)
        now, times = times, times - self.delay
        of_user = self._groups["user"].before(users, times, users >= 0)
        own = self._rates(of_user, None)
        found = [
            self._as_floats(self._groups["item"].before(items, np.minimum(times, self.until), items >= 0), None),
            self._as_floats(of_user, None),
        ]
        pair = users * self._num_items + items
        found.append(self._as_floats(self._groups["user x item"].before(pair, times, (users >= 0) & (items >= 0)), own))
        for name, size in self._sizes.items():
            codes, lengths = values[name]
            owner = np.arange(len(users)) if lengths is None else np.repeat(np.arange(len(users)), lengths)
            early = np.minimum(times, self.until)[owner]
            of_all = self._groups[name].before(codes, early, codes >= 0)
            crossed = users[owner] * size + codes
            of_pair = self._groups[f"user x {name}"].before(crossed, times[owner], users[owner] >= 0)
            if lengths is not None:
                of_all, of_pair = _means(of_all, lengths), _means(of_pair, lengths)
            found += [self._as_floats(of_all, None), self._as_floats(of_pair, own)]
        known = last >= 0
        gap = np.clip(np.where(known, now - last, 0), 0, _LONGEST_GAP)
        found.append(np.stack([np.log1p(gap) / 8, known.astype(np.float64)]))
        return np.ascontiguousarray(np.concatenate(found).T, np.float32)

    def _group(self, rows: Int64Array, times: Int64Array, values: Sequence[Floats]) -> _Running:
        return _Running(rows, times, values, self._first_time, self._span)

    def _rates(self, counts: Floats, priors: list[Floats] | None) -> list[Floats]:
        """Return the mean of every action, which starts at its `priors` [T], None: its mean in training."""
        rates = []
        for number, (mean, _) in enumerate(self._statistics):
            prior: Floats | float = mean if priors is None else priors[number]
            rates.append((counts[2 + 2 * number] + _PRIOR * prior) / (counts[1 + 2 * number] + _PRIOR))
        return rates

    def _as_floats(self, counts: Floats, priors: list[Floats] | None) -> Floats:
        """From events, and known ones and sum per action, to floats of about unit size."""
        columns = [np.log1p(counts[0]) / 3]
        for number, rate in enumerate(self._rates(counts, priors)):
            mean, std = self._statistics[number]
            prior = np.full(len(rate), mean) if priors is None else priors[number]
            columns.append((rate - prior) / std if std else _logit(rate) - _logit(prior))
        return np.stack(columns)


class _Running:
    """Events of groups in the order of time, with the sums of `values` [n] up to each; NaN is not known."""

    def __init__(
        self, rows: Int64Array, times: Int64Array, values: Sequence[Floats], first_time: int, span: int
    ) -> None:
        self._first_time, self._span = first_time, span
        keys = self._keys(rows, times)
        order = np.argsort(keys, kind="stable")
        self._sorted, self._times = keys[order], times[order]
        self._sums = [np.zeros(len(keys) + 1) for _ in range(2 * len(values))]
        for number, column in enumerate(values):
            known = ~np.isnan(column[order])
            np.cumsum(known, out=self._sums[2 * number][1:])
            np.cumsum(np.where(known, column[order], 0), out=self._sums[2 * number + 1][1:])

    def _keys(self, rows: Int64Array, times: Int64Array) -> Int64Array:
        """Return one number per row and time, in the order of rows, then times."""
        keys: Int64Array = np.maximum(rows, 0) * self._span + np.clip(times - self._first_time, 0, self._span - 1)
        return keys

    def _range(self, rows: Int64Array, times: Int64Array) -> tuple[Int64Array, Int64Array]:
        first = np.searchsorted(self._sorted, np.maximum(rows, 0) * self._span)
        return first, np.searchsorted(self._sorted, self._keys(rows, times))

    def before(self, rows: Int64Array, times: Int64Array, known: NDArray[np.bool_]) -> Floats:
        """Return how many events of `rows` [T] are before `times` [T], and their sums, [1 + sums, T]; 0 if unknown."""
        first, last = self._range(rows, times)
        found = np.stack([(last - first).astype(np.float64), *(sums[last] - sums[first] for sums in self._sums)])
        return np.where(known, found, 0)

    def newest(self, rows: Int64Array, times: Int64Array, known: NDArray[np.bool_]) -> Int64Array:
        """Return the time of the last event of `rows` [T] before `times` [T], -1 of none."""
        first, last = self._range(rows, times)
        has = known & (last > first)
        found: Int64Array = np.full(len(rows), -1, np.int64)
        found[has] = self._times[last[has] - 1]
        return found


def _means(counts: Floats, lengths: Int64Array) -> Floats:
    """Return the means over the values of every token, 0 of none; `counts` [k, values]."""
    ends = np.concatenate([np.zeros((len(counts), 1)), np.cumsum(counts, axis=1)], axis=1)
    bounds = offsets_of(lengths)
    means: Floats = (ends[:, bounds[1:]] - ends[:, bounds[:-1]]) / np.maximum(lengths, 1)
    return means


def _logit(rate: Floats) -> Floats:
    rate = np.clip(rate, 1e-4, 1 - 1e-4)
    found: Floats = np.log(rate / (1 - rate))
    return found
