"""Histories given by a caller: raw items and times in any usual form -> item rows and seconds."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from turbogr.data.store import Store
from turbogr.data.times import END_OF_TIME, parse_time
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError

Time = int | float | str | datetime.datetime | np.datetime64
History = Sequence[tuple[Any, Time | None]]
Unknown = Literal["warn", "skip", "raise"]


@dataclass(frozen=True)
class Histories:
    """The known events of each history in order of time: item rows and seconds; `request_times` [n]."""

    items: list[Int64Array]
    times: list[Int64Array]
    request_times: Int64Array


def read_histories(
    histories: Iterable[History], at: Time | Sequence[Time] | None, store: Store, unknown: Unknown
) -> Histories:
    """Look the raw items of `histories` up in the vocabulary of `store` and sort each history by time.

    A history is a sequence of (raw item, time); where the store has positions instead of times, the time may be None
    and the order counts. `at` is the time of the request, one for all or one per history, by default that of the last
    event. Unknown items are left out: with a warning, silently ("skip"), or not at all ("raise").

    Raises:
        UserError: a history or a time that cannot be read, an unknown item, or a request before the last event.
    """
    if unknown not in ("warn", "skip", "raise"):
        raise UserError(f"unknown is {unknown!r}; choose from 'warn', 'skip' and 'raise'")
    positions = store.manifest.times == "positions"
    raw_items: list[Any] = []
    raw_times: list[int] = []
    lengths: list[int] = []
    for number, history in enumerate(histories):
        items, times = _read_history(history, number, positions)
        raw_items += items
        raw_times += times
        lengths.append(len(items))
    rows = store.item_ids.encode(raw_items)
    _report_unknown(raw_items, rows, unknown)

    all_times = np.array(raw_times, np.int64)
    request_times = _request_times(at, len(lengths))
    found = Histories([], [], np.zeros(len(lengths), np.int64))
    ends = np.cumsum(lengths, dtype=np.int64)
    for number, (length, end) in enumerate(zip(lengths, ends.tolist(), strict=True)):
        times_here, rows_here = all_times[end - length : end], rows[end - length : end]
        last = int(times_here.max(initial=0))
        request = last + positions if request_times is None else request_times[number]
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


def _read_history(history: History, number: int, positions: bool) -> tuple[list[Any], list[int]]:
    items, times = [], []
    if isinstance(history, str | bytes) or not isinstance(history, Iterable):
        raise UserError(f"history {number} is {history!r}; give a list of (item, time) pairs for each user")
    for place, event in enumerate(history):
        if not isinstance(event, tuple | list) or len(event) != 2:
            raise UserError(
                f"history {number}, event {place} is {event!r}, not an (item, time) pair; a history is a list of "
                "pairs, and a single history must be in a list of its own"
            )
        items.append(event[0])
        if event[1] is None and positions:
            times.append(place)
        else:
            times.append(seconds_of(event[1], f"history {number}, event {place}"))
    return items, times


def _request_times(at: Time | Sequence[Time] | None, num_histories: int) -> list[int] | None:
    if at is None:
        return None
    if isinstance(at, list | tuple | np.ndarray):
        if len(at) != num_histories:
            raise UserError(f"at has {len(at)} times for {num_histories} histories; give one for each, or one for all")
        return [seconds_of(time, f"at, number {number}") for number, time in enumerate(at)]
    return [seconds_of(at, "at")] * num_histories


def _report_unknown(raw_items: list[Any], rows: Int64Array, unknown: Unknown) -> None:
    missing = np.flatnonzero(rows < 0)
    if not len(missing) or unknown == "skip":
        return
    examples = list(dict.fromkeys(repr(raw_items[place]) for place in missing[:100]))
    sentence = (
        f"{len(missing):,} of {len(rows):,} events are of items that the model does not know, such as "
        f"{', '.join(examples[:3])}"
    )
    if unknown == "raise":
        raise UserError(f"{sentence}; remove them, or pass unknown='skip'")
    warnings.warn(f"{sentence}; they are left out", stacklevel=4)
