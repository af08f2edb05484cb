"""Histories of users, whether a store has them or a caller gives them; the one input of everything that recommends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from turbogr.data.batching import Batch, batch_from_histories, history_batch
from turbogr.data.ranges import concatenated_ranges
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array


class HistoryEvents(NamedTuple):
    """Events of n histories one behind the other: item rows and seconds, oldest first; `lengths` [n]."""

    items: Int64Array
    times: Int64Array
    lengths: Int64Array


class UserHistories(Protocol):
    """The histories of n users, none of them empty."""

    @property
    def lengths(self) -> Int64Array:
        """Events of each history, [n]."""
        ...

    def events(self, newest: int | None = None) -> HistoryEvents:
        """Return all events, or the `newest` of each history."""
        ...

    def batch(self, chosen: Int64Array, max_len: int, columns: Mapping[str, str]) -> Batch:
        """Return the newest `max_len` events of the `chosen` histories as a batch, with features from `columns`."""
        ...


@dataclass(frozen=True)
class StoreHistories:
    """Histories of `users` [n] of a store: their events before event `ends` [n].

    `request_times` [n] as in `history_batch`: None if `ends` are the events to predict.
    """

    store: Store
    users: Int64Array
    ends: Int64Array
    request_times: Int64Array | None = None

    @property
    def lengths(self) -> Int64Array:
        lengths: Int64Array = self.ends - np.asarray(self.store.offsets)[self.users]
        return lengths

    def events(self, newest: int | None = None) -> HistoryEvents:
        lengths = self.lengths if newest is None else np.minimum(self.lengths, newest)
        events = concatenated_ranges(self.ends - lengths, lengths)
        items = np.asarray(self.store.items[events], np.int64)
        return HistoryEvents(items, np.asarray(self.store.times[events]), lengths)

    def batch(self, chosen: Int64Array, max_len: int, columns: Mapping[str, str]) -> Batch:
        times = None if self.request_times is None else self.request_times[chosen]
        users, ends = self.users[chosen], self.ends[chosen]
        return history_batch(self.store, users, ends, max_len, request_times=times, columns=columns)


@dataclass(frozen=True)
class GivenHistories:
    """Histories as item rows and seconds, oldest first; `request_times` [n]. They carry no features."""

    items: list[Int64Array]
    times: list[Int64Array]
    request_times: Int64Array

    @property
    def lengths(self) -> Int64Array:
        return np.array([len(row) for row in self.items], np.int64)

    def events(self, newest: int | None = None) -> HistoryEvents:
        lengths = self.lengths if newest is None else np.minimum(self.lengths, newest)
        cut = [
            np.concatenate(
                [np.empty(0, np.int64), *(row[len(row) - n :] for row, n in zip(rows, lengths, strict=True))]
            )
            for rows in (self.items, self.times)
        ]
        return HistoryEvents(cut[0], cut[1], lengths)

    def batch(self, chosen: Int64Array, max_len: int, columns: Mapping[str, str]) -> Batch:
        return batch_from_histories(
            [self.items[place][-max_len:].tolist() for place in chosen],
            [self.times[place][-max_len:].tolist() for place in chosen],
            self.request_times[chosen].tolist(),
        )
