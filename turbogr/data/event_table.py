"""Tables that a caller asks with: events of users (user, item, time), users alone, items alone, or pairs of both.

Columns are found as `prepare` finds them: named by the caller, called as in the log of the store, or by a usual name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.dataframes import ids_array
from turbogr.data.histories import (
    Histories,
    Time,
    TypicalTimes,
    Unknown,
    read_histories,
    report_unknown,
    request_times,
    sorted_histories,
)
from turbogr.data.prepare.columns import usual_columns
from turbogr.data.prepare.source import NO_COLUMN
from turbogr.data.prepare.sources.memory_table import as_arrow, column_names
from turbogr.data.prepare.time_column import TimeFormChanged, detect_form, explain, parse_times
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, did_you_mean


@dataclass(frozen=True)
class NamedColumns:
    """Columns of a caller's table, where it names them; None: found by their names."""

    user: str | None = None
    item: str | None = None
    time: str | None = None


def find_column(role: str, names: Sequence[str], store: Store, named: NamedColumns, what: str) -> str | None:
    """Return the column of the role "user", "item" or "time" of the table called `what`, None if there is none.

    Raises:
        UserError: the named column is not there, or several look right.
    """
    asked = getattr(named, role)
    if asked is not None:
        if asked not in names and not (role == "time" and asked == NO_COLUMN):
            raise UserError(
                f"{what} has no column {asked!r} (--{role}-column); it has {', '.join(map(repr, names))}."
                f"{did_you_mean(str(asked), names)}"
            )
        return None if asked == NO_COLUMN else str(asked)
    in_log = (store.manifest.settings.get("columns") or {}).get(role)
    if in_log in names:
        return str(in_log)
    found = usual_columns(role, names)
    if len(found) > 1:
        listed = " and ".join(map(repr, found))
        raise UserError(f"{what}: {listed} both look like the {role}; say which with --{role}-column")
    return found[0] if found else None


def column_of(role: str, table: Any, store: Store, named: NamedColumns, what: str) -> pa.Array:
    """Return the raw ids of the users or items of a table: the column of that role, or the only one.

    Raises:
        UserError: no such column, or a record without an id.
    """
    names = column_names(table)
    column = find_column(role, names, store, named, what)
    if column is None and len(names) == 1:
        column = names[0]
    if column is None:
        listed = ", ".join(map(repr, names)) or "none"
        raise UserError(f"which column of {what} has the {role}s? Name it with --{role}-column. Its columns: {listed}")
    return ids_array(as_arrow(table, [column]).column(0).combine_chunks(), f"column {column!r} of {what}")


def read_event_table(
    table: Any,
    at: Time | Sequence[Time] | None,
    store: Store,
    unknown: Unknown,
    named: NamedColumns,
    typical: Callable[[], TypicalTimes],
) -> tuple[pa.Array, Histories]:
    """Return the users of a table of events, in the order in which they first appear, and their histories.

    Without a time column the order of the records counts, and times are the `typical` ones. Items may also be lists,
    a record per user.

    Raises:
        UserError: a column is missing, a time cannot be read, an unknown item, or a request before the last event.
    """
    what = "the table of events"
    time = find_column("time", column_names(table), store, named, what)
    users = column_of("user", table, store, named, what)
    lists = _lists_of_items(table, time, store, named, what)
    if lists is not None:
        return users, read_histories(lists, at, store, unknown, typical)
    items = column_of("item", table, store, named, what)
    encoded = users.dictionary_encode()  # codes follow the order of first appearance
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = np.bincount(codes, minlength=len(encoded.dictionary)).astype(np.int64)
    requests = request_times(at, len(lengths))
    ticks, per_second = (np.arange(len(codes)), 1) if time is None else read_times(table, time)
    order = np.lexsort((ticks, codes))  # stable: the order of the records decides between equal times
    positions = store.manifest.times == "positions"
    by_order = positions or time is None
    times = _spaced(lengths, requests, typical(), positions) if by_order else ticks[order] // per_second
    rows = store.item_ids.encode(items)
    report_unknown(items, rows, unknown)
    return encoded.dictionary, sorted_histories(rows[order], times, lengths, requests, positions)


def _lists_of_items(
    table: Any, time: str | None, store: Store, named: NamedColumns, what: str
) -> list[list[Any]] | None:
    """Return the histories of a table that has one per record; None where it has events."""
    column = find_column("item", column_names(table), store, named, what)
    items = None if column is None else as_arrow(table, [column]).column(0)
    if items is None or not pa.types.is_nested(items.type):
        return None
    histories = [items or [] for items in items.to_pylist()]
    if time is None:
        return histories
    moments = as_arrow(table, [time]).column(0)
    times = [each or [] for each in moments.to_pylist()] if pa.types.is_nested(moments.type) else []
    if [len(each) for each in times] != [len(each) for each in histories]:
        raise UserError(
            f"{what}: column {column!r} has a list of items per record, so {time!r} needs a list of as many times; or "
            "give a record per event, or --time-column none"
        )
    return [list(zip(*pair, strict=True)) for pair in zip(histories, times, strict=True)]


def _spaced(lengths: Int64Array, requests: Sequence[int] | None, typical: TypicalTimes, positions: bool) -> Int64Array:
    """Times of histories that have an order alone, one behind the other."""
    parts = [np.zeros(0, np.int64)]
    for number, length in enumerate(lengths.tolist()):
        end = typical.newest if requests is None else requests[number]
        parts.append(np.arange(length, dtype=np.int64) if positions else typical.before(end, length))
    return np.concatenate(parts)


def read_times(table: Any, name: str) -> tuple[Int64Array, int]:
    """Return a column of times in ticks, and how many there are in a second.

    Raises:
        UserError: a time cannot be read.
    """
    values = as_arrow(table, [name]).column(0).combine_chunks()
    form = detect_form(values, name, "auto", None)
    while True:
        try:
            times = parse_times(values, form)
            break
        except TimeFormChanged as changed:
            form = dataclasses.replace(form, **changed.changes)  # type: ignore[arg-type]
    wrong = np.flatnonzero(times.reasons)
    if len(wrong):
        place = int(wrong[0])
        text = str(pc.cast(values.slice(place, 1), pa.string())[0].as_py())
        raise UserError(f"row {place + 1:,} of the table: {explain(int(times.reasons[place]), text, form, name)}")
    return times.ticks, form.ticks_per_second
