"""Histories given by a caller: raw items and times in any usual form -> item rows and seconds.

A history without times gets times that are typical of the training data (`TypicalTimes`), because models read the time
between events: its last event is at the newest time of the data, and the event j before it is as much older as the
median user's is.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from turbogr.data.store import Store
from turbogr.data.times import END_OF_TIME, parse_time
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, warn_caller

Time = int | float | str | datetime.datetime | np.datetime64
History = Sequence[Any]
"""A sequence of raw items, oldest first, or of (raw item, time) pairs in any order."""
Unknown = Literal["warn", "skip", "raise"]

_SAMPLED_EVENTS = 1 << 20
_MOST_AGES = 1 << 10


@dataclass(frozen=True)
class Histories:
    """The known events of each history in order of time: item rows and seconds; `request_times` [n]."""

    items: list[Int64Array]
    times: list[Int64Array]
    request_times: Int64Array


@dataclass(frozen=True)
class TypicalTimes:
    """The newest time of a store, and how much older than a user's last event the one j before it is, by j, in seconds.

    `ages` are medians over users. They show what a model expects: most events are of the same session as the last one,
    and then there is a break. Equal gaps would show neither.
    """

    newest: int
    ages: tuple[int, ...]

    @classmethod
    def of(cls, store: Store) -> TypicalTimes:
        """Read the newest time of all users, and the ages of the events of the first users, about a million events."""
        ends = np.asarray(store.offsets[1:])
        newest = int(np.asarray(store.times[ends[np.diff(store.offsets) > 0] - 1]).max(initial=0))
        num_users = max(1, int(np.searchsorted(store.offsets, _SAMPLED_EVENTS, side="right")) - 1)
        starts, ends = (np.asarray(store.offsets[first : first + num_users]) for first in (0, 1))
        ages = [0]
        while len(ages) < _MOST_AGES and (ends - starts > len(ages)).any():
            longer = ends[ends - starts > len(ages)]
            age = np.median(np.asarray(store.times[longer - 1]) - np.asarray(store.times[longer - 1 - len(ages)]))
            ages.append(max(ages[-1], int(age)))  # where few users are left, the median may fall
        return cls(newest, tuple(ages))

    def before(self, end: int, length: int) -> Int64Array:
        """Return the times of `length` events, the last at `end`; beyond the known ages they grow evenly."""
        steps = np.arange(length - 1, -1, -1, dtype=np.int64)
        known = len(self.ages) - 1
        beyond = np.maximum(steps - known, 0) * (self.ages[-1] // max(1, known))
        ages: Int64Array = np.array(self.ages, np.int64)[np.minimum(steps, known)] + beyond
        return np.maximum(end - ages, 0)


def read_histories(
    histories: Iterable[History],
    at: Time | Sequence[Time] | None,
    store: Store,
    unknown: Unknown,
    typical: Callable[[], TypicalTimes] | None = None,
) -> Histories:
    """Look the raw items of `histories` up in the vocabulary of `store` and sort each history by time.

    A history is a sequence of (raw item, time), or of raw items alone, oldest first; where the store has positions
    instead of times, a time may also be None and the order counts. `at` is the time of the request, one for all or one
    per history, by default that of the last event. Unknown items are left out: with a warning, silently ("skip"), or
    not at all ("raise"). `typical` returns the store's typical times, for histories without any.

    Raises:
        UserError: a history or a time that cannot be read, an unknown item, or a request before the last event.
    """
    check_unknown(unknown)
    positions = store.manifest.times == "positions"
    raw_items: list[Any] = []
    raw_times: list[list[int] | None] = []
    for number, history in enumerate(histories):
        items, times = _read_history(history, number, positions)
        raw_items.append(items)
        raw_times.append(times)
    requests = request_times(at, len(raw_items))
    usual: TypicalTimes | None = None
    if any(times is None for times in raw_times):
        usual = TypicalTimes(0, (0,)) if positions else (typical or (lambda: TypicalTimes.of(store)))()
    all_times = [
        _times_of(times, len(items), None if requests is None else requests[number], usual, positions)
        for number, (items, times) in enumerate(zip(raw_items, raw_times, strict=True))
    ]
    flat = [item for items in raw_items for item in items]
    rows = store.item_ids.encode(flat)
    report_unknown(flat, rows, unknown)
    lengths = np.array([len(items) for items in raw_items], np.int64)
    flat_times = np.concatenate([np.zeros(0, np.int64), *all_times])
    return sorted_histories(rows, flat_times, lengths, requests, positions)


def sorted_histories(
    rows: Int64Array, times: Int64Array, lengths: Int64Array, requests: Sequence[int] | None, positions: bool
) -> Histories:
    """Sort the events of histories, one behind the other, by time, and leave out those of unknown items (row -1).

    Raises:
        UserError: a request lies before the last event of its history.
    """
    found = Histories([], [], np.zeros(len(lengths), np.int64))
    ends = np.cumsum(lengths, dtype=np.int64)
    for number, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
        times_here, rows_here = times[end - length : end], rows[end - length : end]
        last = int(times_here.max(initial=0))
        request = last + positions if requests is None else requests[number]
        if request < last:
            raise UserError(
                f"history {number}: the request at {request} lies before its last event at {last}; "
                "leave the later events out or give a later time"
            )
        order = np.argsort(times_here, kind="stable")
        order = order[rows_here[order] >= 0]
        found.items.append(rows_here[order])
        found.times.append(times_here[order])
        found.request_times[number] = request
    return found


def seconds_of(time: Any, where: str) -> int:
    """Return a time as whole seconds since 1970, from a number, a datetime or ISO text; UTC unless it says otherwise.

    Raises:
        UserError: not a time, or one before 1970 or after 2200, which is nearly always another unit.
    """
    read: float | None = None
    if isinstance(time, str):
        read = parse_time(time)
    elif isinstance(time, datetime.datetime):
        read = (time if time.tzinfo is not None else time.replace(tzinfo=datetime.timezone.utc)).timestamp()
    elif isinstance(time, np.datetime64):
        read = None if np.isnat(time) else int(time.astype("datetime64[s]").astype(np.int64))
    elif isinstance(time, (int, float, np.integer, np.floating)) and not isinstance(time, bool):
        read = time if isinstance(time, int) else float(time)
    if read is None or not math.isfinite(read):
        raise UserError(f"{where}: cannot read {time!r} as a time; give seconds since 1970, a datetime or ISO text")
    if not 0 <= read < END_OF_TIME:
        raise UserError(f"{where}: {time!r} lies before 1970 or after 2200; give seconds, not another unit")
    return int(read)


def request_times(at: Time | Sequence[Time] | None, num_histories: int) -> list[int] | None:
    """Return the time of each request in seconds, None if none is given; one `at` is for all.

    Raises:
        UserError: not a time, or another number of times than of histories.
    """
    if at is None:
        return None
    if isinstance(at, list | tuple | np.ndarray):
        if len(at) != num_histories:
            raise UserError(f"at has {len(at)} times for {num_histories} histories; give one for each, or one for all")
        return [seconds_of(time, f"at, number {number}") for number, time in enumerate(at)]
    return [seconds_of(at, "at")] * num_histories


def check_unknown(unknown: Any) -> None:
    """Raise UserError unless it says what to do with what is unknown."""
    if unknown not in ("warn", "skip", "raise"):
        raise UserError(f"unknown is {unknown!r}; choose from 'warn', 'skip' and 'raise'")


def report_unknown(raw_items: Sequence[Any], rows: Int64Array, unknown: Unknown, what: str = "events are of") -> None:
    """Warn of items without a row, or raise UserError, as `unknown` says."""
    missing = np.flatnonzero(rows < 0)
    if not len(missing) or unknown == "skip":
        return
    examples = list(dict.fromkeys(repr(_plain(raw_items[int(place)])) for place in missing[:100]))
    sentence = (
        f"{len(missing):,} of {len(rows):,} {what} items that the model does not know, such as "
        f"{', '.join(examples[:3])}"
    )
    if unknown == "raise":
        raise UserError(f"{sentence}; remove them, or pass unknown='skip'")
    warn_caller(f"{sentence}; they are left out")


def _times_of(
    times: list[int] | None, length: int, request: int | None, usual: TypicalTimes | None, positions: bool
) -> Int64Array:
    if times is not None:
        return np.array(times, np.int64)
    assert usual is not None, "histories without times need typical ones"
    if positions:
        return np.arange(length, dtype=np.int64)
    return usual.before(usual.newest if request is None else request, length)


def _read_history(history: Any, number: int, positions: bool) -> tuple[list[Any], list[int] | None]:
    """Return the items and times of a history; None for the times if it has none."""
    if hasattr(history, "tolist") or hasattr(history, "to_pylist"):  # a column of NumPy, pandas, polars or pyarrow
        history = history.to_pylist() if hasattr(history, "to_pylist") else history.tolist()
    elif hasattr(history, "to_list"):
        history = history.to_list()
    if isinstance(history, str | bytes) or not isinstance(history, Iterable):
        raise UserError(f"history {number} is {history!r}; give a list of items or of (item, time) pairs for each user")
    events = list(history)
    pairs = [isinstance(event, tuple | list) for event in events]
    if not any(pairs) and not isinstance(history, tuple):
        return events, None
    items, times = [], []
    for place, event in enumerate(events):
        if not isinstance(event, tuple | list) or len(event) != 2:
            raise UserError(
                f"history {number}, event {place} is {event!r}, not an (item, time) pair; a history is a list of "
                "pairs, or of items alone, and a single history must be in a list of its own"
            )
        items.append(event[0])
        if event[1] is None and positions:
            times.append(place)
        else:
            times.append(seconds_of(event[1], f"history {number}, event {place}"))
    return items, times


def _plain(value: Any) -> Any:
    if hasattr(value, "as_py"):
        return value.as_py()
    return value.item() if isinstance(value, np.generic) else value
