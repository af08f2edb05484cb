"""What the baselines of a ranking task know of every event: ids, features, and counts and rates of what was before it.

A row never knows its own event or a later one. What a user did counts up to the request, as a model sees it; what
others did counts where it is among the training events. Events of the same second are not before each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.ranges import concatenated_ranges, offsets_of
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.action_baselines.running_sums import first_of_runs, running_sums
from turbogr.evaluation.action_evaluation import Target, action_labels

Floats = NDArray[np.float64]
Features = NDArray[np.float32]

RECENT = 10  # newest events of a user that the recent rates count
_SMOOTHING = 10.0  # events of the overall rate that every rate begins with
_MOST_CATEGORIES = 255  # categories with more values are for the trees rates only
_LARGEST = 5.0  # standard deviations of a number for the linear methods


@dataclass(frozen=True)
class Field:
    """A category of every event: `codes` [N] below `size`, with `offsets` [E + 1] where an event has any number."""

    name: str
    codes: Int64Array
    size: int
    offsets: Int64Array | None = None


@dataclass(frozen=True)
class Counts:
    """Of a group, by event [E]: how often `task` is known of earlier events (`known`), and the `sums` of its labels."""

    known: dict[str, Floats]
    sums: dict[str, Floats]


@dataclass(frozen=True)
class ActionRows:
    """All events of a store, E, as rows. `numbers` [E, C] have the names `number_names` and no missing values.

    `labels` by task [E] are NaN where not known. `train`, `valid` and `test` are event indices; without a validation
    part, `valid` is the newest tenth of the training events. `rates` by task is the mean of the training labels.
    """

    fields: list[Field]
    numbers: Features
    number_names: list[str]
    labels: dict[str, Floats]
    kinds: dict[str, str]
    train: Int64Array
    valid: Int64Array
    users: Int64Array
    times: Int64Array
    rates: dict[str, float]
    of_item: Counts
    of_user: Counts

    def newest(self, events: Int64Array, most: int) -> Int64Array:
        """Return the newest `most` of some events, in the order of the store."""
        order = np.argsort(self.times[events], kind="stable")
        return np.sort(events[order[len(events) - most :]])

    def one_hot(self) -> sparse.csr_matrix:
        """Return fields and standardised numbers as a sparse matrix [E, columns], float32; the last column is 1."""
        blocks = [_one_hot(field, len(self.numbers)) for field in self.fields]
        sample = self.numbers[self.train]
        mean, deviation = sample.mean(0, np.float64), sample.std(0, dtype=np.float64)
        scaled = (self.numbers - mean) / np.where(deviation > 1e-6, deviation, 1)
        blocks.append(sparse.csr_matrix(np.clip(scaled, -_LARGEST, _LARGEST).astype(np.float32)))
        blocks.append(sparse.csr_matrix(np.ones((len(self.numbers), 1), np.float32)))
        return sparse.hstack(blocks, "csr", np.float32)

    def table(self) -> tuple[Features, list[int]]:
        """Return the rows for trees: numbers and then the small categories; and which columns are categories."""
        small = [field for field in self.fields if field.offsets is None and field.size <= _MOST_CATEGORIES]
        width = self.numbers.shape[1]
        columns = [field.codes.astype(np.float32)[:, None] for field in small]
        return np.concatenate([self.numbers, *columns], 1), list(range(width, width + len(small)))


def _one_hot(field: Field, num_rows: int) -> sparse.csr_matrix:
    offsets = np.arange(num_rows + 1) if field.offsets is None else field.offsets
    lengths = np.diff(offsets)
    values = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(np.float32)
    return sparse.csr_matrix((values, field.codes, offsets), (num_rows, field.size))


def action_rows(
    store: Store,
    split: Split,
    targets: Mapping[str, Target],
    columns: Iterable[str],
    *,
    stop: Callable[[], None] = lambda: None,
) -> ActionRows:
    """Collect the rows of a store, with the features `columns` (keys of the store) besides ids and times."""
    labels = {name: action_labels(store, target.action or name) for name, target in targets.items()}
    times = np.asarray(store.times, np.int64)
    train, valid = (
        concatenated_ranges(starts, ends - starts) for starts, ends in map(split.events, ("train", "valid"))
    )
    if not len(valid):
        newest = np.argsort(times[train], kind="stable")[len(train) - max(1, len(train) // 10) :]
        valid = np.sort(train[newest])
        train = np.setdiff1d(train, valid, assume_unique=True)
    users = np.repeat(np.arange(store.num_users), np.diff(store.offsets))
    items = np.asarray(store.items, np.int64)
    fields = [Field("user", users, store.num_users), Field("item", items, store.num_items)]
    numbers = _Numbers(times, users, labels, {n: t.kind for n, t in targets.items()}, train, stop)
    if store.manifest.times == "real":
        fields.append(Field("hour", times // 3600 % 24, 24))
    rows_of = {"user": users, "item": items, "event": np.arange(store.num_events)}
    for column in (store.features[key] for key in columns):
        if column.info.kind in ("category", "categories"):
            fields.append(_field(column, rows_of[column.owner]))
        elif column.owner != "action":
            numbers.add(column.key, column.floats(rows_of[column.owner]))
    of_item = numbers.add_rates(fields[1], numbers.rates, of_training=True)
    of_user = numbers.add_rates(fields[0], numbers.rates)
    own = {name: _smoothed(of_user, name, rate) for name, rate in numbers.rates.items()}
    numbers.add_recent()
    numbers.add_rates(_crossed(fields[1], users), own)
    for field in fields[2:]:
        if not field.name.startswith("user."):
            numbers.add_rates(field, numbers.rates, of_training=True)
            numbers.add_rates(_crossed(field, users), own)
    kinds = {name: target.kind for name, target in targets.items()}
    table = np.concatenate(numbers.columns, 1, dtype=np.float32)
    return ActionRows(
        fields, table, numbers.names, labels, kinds, train, valid, users, times, numbers.rates, of_item, of_user
    )


def _field(column: FeatureColumn, rows: Int64Array) -> Field:
    if column.info.kind == "category":
        return Field(column.key, column.table_rows(rows), column.info.num_rows)
    codes, lengths = column.table_row_lists(rows)
    return Field(column.key, codes, column.info.num_rows, offsets_of(lengths))


def _crossed(field: Field, users: Int64Array) -> Field:
    """Return the pairs of the events' users and a field's values."""
    if field.offsets is not None:
        users = np.repeat(users, np.diff(field.offsets))
    return Field(f"user x {field.name}", users * field.size + field.codes, 0, field.offsets)


def _smoothed(counts: Counts, name: str, prior: float | Floats) -> Floats:
    smoothed: Floats = (counts.sums[name] + _SMOOTHING * prior) / (counts.known[name] + _SMOOTHING)
    return smoothed


class _Numbers:
    """Columns of numbers under construction."""

    def __init__(
        self,
        times: Int64Array,
        users: Int64Array,
        labels: Mapping[str, Floats],
        kinds: Mapping[str, str],
        train: Int64Array,
        stop: Callable[[], None],
    ) -> None:
        self.times, self.users, self.labels, self.kinds, self.stop = times, users, labels, kinds, stop
        self.columns: list[NDArray[np.floating]] = []
        self.names: list[str] = []
        known = [~np.isnan(found) for found in labels.values()]
        sums = [np.where(is_known, found, 0) for is_known, found in zip(known, labels.values(), strict=True)]
        # Per event: itself, and by task whether it is known and what it is.
        self.values = np.stack([np.ones(len(times)), *known, *sums], 1)
        self.of_training = np.zeros_like(self.values)
        self.of_training[train] = self.values[train]
        total = self.of_training.sum(0)
        half = len(labels)
        self.rates = {
            name: float(total[1 + half + place] / total[1 + place]) if total[1 + place] else 0.0
            for place, name in enumerate(labels)
        }

    def add(self, name: str, values: NDArray[np.floating]) -> None:
        """Add columns [E, c] of one name."""
        self.columns.append(values.astype(np.float32))
        self.names += [name] * values.shape[1]

    def add_rates(self, field: Field, priors: Mapping[str, float | Floats], *, of_training: bool = False) -> Counts:
        """Add how often the field's value was there before, and the smoothed rate of every task; return the counts.

        Where an event has several values these are means over them.
        """
        self.stop()
        values, times = self.of_training if of_training else self.values, self.times
        if field.offsets is not None:
            events = np.repeat(np.arange(len(times)), np.diff(field.offsets))
            values, times = values[events], times[events]
        sums = running_sums(field.codes, times, values)
        if field.offsets is not None:
            weights = np.diff(field.offsets)
            mean = sparse.csr_matrix((np.ones(len(events)), np.arange(len(events)), field.offsets))
            sums = (mean @ sums) / np.maximum(weights, 1)[:, None]
        half = len(self.labels)
        counts = Counts(
            {name: sums[:, 1 + place] for place, name in enumerate(self.labels)},
            {name: sums[:, 1 + half + place] for place, name in enumerate(self.labels)},
        )
        self.add(f"events of {field.name}", np.log1p(sums[:, :1]))
        for name in self.labels:
            self.add(f"{name} of {field.name}", self._scaled(name, _smoothed(counts, name, priors[name]))[:, None])
        return counts

    def add_recent(self) -> None:
        """Add the rates of the user's newest event and of the newest few, and the time since the newest one."""
        first = first_of_runs(self.users, self.times)
        start = first_of_runs(self.users)
        before = np.zeros((len(first) + 1, self.values.shape[1]))
        np.cumsum(self.values, axis=0, out=before[1:])
        half = len(self.labels)
        for newest in (1, RECENT):
            sums = before[first] - before[np.maximum(start, first - newest)]
            for place, name in enumerate(self.labels):
                rate = (sums[:, 1 + half + place] + self.rates[name]) / (sums[:, 1 + place] + 1)
                self.add(f"{name} of newest {newest}", rate[:, None])
        gap = self.times - self.times[np.maximum(first - 1, 0)]
        self.add("seconds since the newest", np.where(first > start, np.log1p(np.maximum(gap, 0)), -1.0)[:, None])

    def _scaled(self, name: str, rates: Floats) -> Floats:
        """Return rates as log-odds; means of numbers stay as they are."""
        if self.kinds[name] != "binary":
            return rates
        p = np.clip(rates, 1e-6, 1 - 1e-6)
        return np.log(p) - np.log1p(-p)
