"""Filters on the sorted log: repeated events and the k-core, without any state per event."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.ranges import add_counts
from turbogr.data.vocabulary import Int64Array

DUPLICATES = ("keep", "exact", "item")
Blocks = Callable[[], Iterable[tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]]]


@dataclass(frozen=True)
class Filters:
    """Which events are filtered out of the sorted log, as `prepare` takes it; `duplicates` is one of DUPLICATES."""

    min_user_events: int
    min_item_events: int
    duplicates: str

    @property
    def has_core(self) -> bool:
        """Whether users or items need a number of events to stay."""
        return self.min_user_events > 1 or self.min_item_events > 1

    @property
    def core_reason(self) -> str:
        """The reason under which events are counted that the k-core drops."""
        users, items = self.min_user_events, self.min_item_events
        if users > 1 and items > 1:
            return f"user with fewer than {users} or item with fewer than {items} events"
        return f"user with fewer than {users} events" if users > 1 else f"item with fewer than {items} events"

    @property
    def duplicate_reason(self) -> str:
        """The reason under which repeated events are counted."""
        return "repeated user, item and time" if self.duplicates == "exact" else "repeated user and item"

    def repeated(self, columns: dict[str, NDArray[Any]]) -> NDArray[np.bool_] | None:
        """Mark the repeated events among the columns "user", "item" and "time"; None if all are kept."""
        if self.duplicates == "keep":
            return None
        return repeated(columns["user"], columns["item"], columns["time"] if self.duplicates == "exact" else None)


def repeated(users: NDArray[Any], items: NDArray[Any], times: NDArray[Any] | None) -> NDArray[np.bool_]:
    """Mark the events that repeat an earlier one's (user, item), or (user, item, time) where `times` is given."""
    keys = [items, users] if times is None else [times, items, users]
    order = np.lexsort(keys)
    again = np.zeros(len(users), bool)
    if len(users) > 1:
        same = np.ones(len(users) - 1, bool)
        for key in keys:
            ordered = key[order]
            same &= ordered[1:] == ordered[:-1]
        again[order[1:][same]] = True
    return again


def core(
    blocks: Blocks, num_users: int, num_items: int, min_user_events: int, min_item_events: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Int64Array]:
    """Find the largest set of users and items in which every user and every item has enough events.

    `blocks()` yields (users, items) of the whole log and is called once per round. Returns which users [U] and items
    [V] stay, and the events left of every user [U].
    """
    keep_user = np.ones(num_users, bool)
    keep_item = np.ones(num_items, bool)
    while True:
        user_counts = np.zeros(num_users, np.int64)
        item_counts = np.zeros(num_items, np.int64)
        for users, items in blocks():
            kept = keep_user[users] & keep_item[items]
            add_counts(user_counts, users[kept])
            add_counts(item_counts, items[kept])
        # An id without events is dropped too, also where no minimum is asked for.
        next_user = user_counts >= max(min_user_events, 1)
        next_item = item_counts >= max(min_item_events, 1)
        if (next_user == keep_user).all() and (next_item == keep_item).all():
            return keep_user, keep_item, user_counts
        keep_user, keep_item = next_user, next_item
