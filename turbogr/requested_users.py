"""Whom a call of `recommend` asks for: users of the store, given histories, or the users of a table of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turbogr.data.dataframes import Kind, default_kind, ids_array, is_table, kind_of
from turbogr.data.event_table import NamedColumns, column_of, find_column, read_event_table
from turbogr.data.histories import Histories, Time, TypicalTimes, Unknown, check_unknown, read_histories, seconds_of
from turbogr.data.prepare.sources.memory_table import arrow_column, column_names
from turbogr.data.ranges import concatenated_ranges
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, warn_caller
from turbogr.evaluation.user_histories import GivenHistories, StoreHistories, UserHistories

Output = Kind | Literal["lists", "dict", "one"]
"""What a request gets: a table, a list per user, a list by user, or the list of the only user."""


class RequestedUsers(Protocol):
    """n users to recommend to; their place in the request is 0..n - 1."""

    @property
    def lengths(self) -> Int64Array:
        """Events of each user that the model knows, [n]."""
        ...

    def ids(self, places: Int64Array) -> NDArray[Any]:
        """Return the raw ids of users."""
        ...

    def histories(self, places: Int64Array) -> UserHistories:
        """Return the histories of users, none of which may be empty."""
        ...

    def seen(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the item rows of users' histories, one behind the other, and how many each has."""
        ...


@dataclass(frozen=True)
class StoreUsers:
    """Users `rows` of a store with their whole histories; `at` is the time of the request, None: the last event's."""

    store: Store
    rows: Int64Array
    at: int | None = None

    @property
    def lengths(self) -> Int64Array:
        lengths: Int64Array = np.asarray(self.store.offsets)[self.rows + 1] - np.asarray(self.store.offsets)[self.rows]
        return lengths

    def ids(self, places: Int64Array) -> NDArray[Any]:
        return self.store.user_ids.decode(self.rows[places])

    def histories(self, places: Int64Array) -> UserHistories:
        users = self.rows[places]
        ends = np.asarray(self.store.offsets)[users + 1]
        last_times = np.asarray(self.store.times[ends - 1])
        to_next = 1 if self.store.manifest.times == "positions" else 0
        times = last_times + to_next if self.at is None else np.full(len(users), self.at)
        if (times < last_times).any():
            late = self.store.user_ids.decode(users[times < last_times][:1])[0]
            raise UserError(
                f"at is {self.at}, before the last event of user {late!r}; leave it out or give a later time"
            )
        return StoreHistories(self.store, users, ends, times)

    def seen(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        starts, lengths = np.asarray(self.store.offsets)[self.rows[places]], self.lengths[places]
        return self.store.items[concatenated_ranges(starts, lengths)].astype(np.int64), lengths


@dataclass(frozen=True)
class GivenUsers:
    """Users with given histories; without `names` a user's id is its place."""

    read: Histories
    names: NDArray[Any] | None = None

    @property
    def lengths(self) -> Int64Array:
        return np.array([len(items) for items in self.read.items], np.int64)

    def ids(self, places: Int64Array) -> NDArray[Any]:
        return places if self.names is None else self.names[places]

    def histories(self, places: Int64Array) -> UserHistories:
        items, times = ([column[place] for place in places.tolist()] for column in (self.read.items, self.read.times))
        return GivenHistories(items, times, self.read.request_times[places])

    def seen(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        rows = [self.read.items[place] for place in places.tolist()]
        return np.concatenate([np.zeros(0, np.int64), *rows]), self.lengths[places]


@dataclass(frozen=True)
class Request:
    """The users of a call, and the `output` it gets unless it asks for another.

    `num_asked` users were asked for; `places` are those of `users` among them, where some were left out as unknown.
    """

    users: RequestedUsers
    output: Output
    num_asked: int
    places: Int64Array


def read_request(
    who: Any,
    store: Store,
    *,
    kind: Literal["users", "histories"] | None,
    at: Time | Sequence[Time] | None,
    unknown: Unknown | None,
    columns: NamedColumns,
    typical: Callable[[], TypicalTimes],
) -> Request:
    """Read whom a call asks for: None is every user of the store; `kind` says what `who` is, None: by its form.

    A table with an item column is a table of events, any other one has users. A mapping has a history per user. A list
    (or column) of single values has users, a list of lists has histories. A single value is one user. `unknown` is what
    to do with unknown users and items; None raises for users and warns of items.

    Raises:
        UserError: it cannot be read, or has users or items that are unknown, if `unknown` says so.
    """
    if unknown is not None:
        check_unknown(unknown)
    if who is None:
        return _request(StoreUsers(store, np.arange(store.num_users), _one_time(at)), default_kind())
    if is_table(who):
        return _table_request(who, kind, store, at, unknown, columns, typical)
    if isinstance(who, Mapping) and kind != "users":
        read = read_histories(who.values(), at, store, unknown or "warn", typical)
        return _request(GivenUsers(read, _objects(list(who))), "dict")
    if isinstance(who, str | bytes) or not isinstance(who, Iterable):
        return _store_request([who], store, at, unknown, "one")
    who = who if kind_of(who) or isinstance(who, np.ndarray) else list(who)
    if kind is None and kind_of(who) and pa.types.is_nested(arrow_column(who, "users", "the call").type):
        kind = "histories"
    if kind == "histories" or (kind is None and _holds_histories(who)):
        return _request(GivenUsers(read_histories(who, at, store, unknown or "warn", typical)), "lists")
    return _store_request(who, store, at, unknown, kind_of(who) or "lists")


def _table_request(
    table: Any,
    kind: Literal["users", "histories"] | None,
    store: Store,
    at: Time | Sequence[Time] | None,
    unknown: Unknown | None,
    columns: NamedColumns,
    typical: Callable[[], TypicalTimes],
) -> Request:
    output = kind_of(table) or "arrow"
    if kind == "histories" or (kind is None and _has_items(table, store, columns)):
        ids, read = read_event_table(table, at, store, unknown or "warn", columns, typical)
        return _request(GivenUsers(read, ids.to_numpy(zero_copy_only=False)), output)
    ids = column_of("user", table, store, columns, "the table of users")
    names = column_names(table)
    if kind is None and len(names) > 1 and len(ids) and (store.user_ids.encode(ids) < 0).all():
        raise UserError(
            f"no column of the table looks like the items of events, and no user of it is in {store.path}; if it has "
            f"events, name their items with --item-column. Its columns: {', '.join(map(repr, names))}"
        )
    return _store_request(ids, store, at, unknown, output)


def _request(users: RequestedUsers, output: Output) -> Request:
    num = len(users.lengths)
    return Request(users, output, num, np.arange(num))


def _store_request(ids: Any, store: Store, at: Any, unknown: Unknown | None, output: Output) -> Request:
    found = ids_array(ids, "users") if len(ids) else np.zeros(0, np.int64)
    rows = store.user_ids.encode(found)
    _report_unknown_users(found, rows, store, unknown or "raise")
    places = np.flatnonzero(rows >= 0)
    return Request(StoreUsers(store, rows[places], _one_time(at)), output, len(rows), places)


def _has_items(table: Any, store: Store, columns: NamedColumns) -> bool:
    names = column_names(table)
    return len(names) > 1 and find_column("item", names, store, columns, "the table") is not None


def _holds_histories(who: Any) -> bool:
    """Whether the values of a list are histories, not users; an empty list holds either."""
    if kind_of(who) is not None:
        return False
    if isinstance(who, np.ndarray):
        return who.ndim > 1
    nested = [not isinstance(value, str | bytes) and isinstance(value, Iterable) for value in who]
    if any(nested) and not all(nested):
        number = nested.index(not nested[0])
        raise UserError(
            f"number {number} is {who[number]!r}, and those before it are of another kind; give a list of users, or a "
            "list of histories"
        )
    return all(nested)


def _report_unknown_users(ids: Any, rows: Int64Array, store: Store, unknown: Unknown) -> None:
    missing = np.flatnonzero(rows < 0)
    if not len(missing) or unknown == "skip":
        return
    first = [ids[int(place)].as_py() for place in missing[:4]]
    shown = ", ".join(repr(raw) for raw in first[:3]) + (", ..." if len(missing) > 3 else "")
    sentence = f"{len(missing):,} of {len(rows):,} users are not in {store.path}: {shown}"
    if unknown == "warn":
        warn_caller(f"{sentence}; they are left out")
        return
    if (store.item_ids.encode(first) >= 0).all() and len(missing) == len(rows):
        raise UserError(f"{sentence}; these are items: a single history must be in a list of its own, [[...]]")
    raise UserError(f"{sentence}; give their histories instead, or pass --skip-unknown")


def _one_time(at: Any) -> int | None:
    if isinstance(at, list | tuple | np.ndarray):
        raise UserError("at has a time per history, but users of the store share one; give one time")
    return None if at is None else seconds_of(at, "at")


def _objects(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array
