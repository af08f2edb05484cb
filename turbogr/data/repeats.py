"""Repeats: held-out items that the user has had before, and whether seen items are candidates.

Where the candidates leave out what a user has had before, no recommender can find a held-out item that is a repeat. In
a log of films that costs little, and people expect new ones. In a log of groceries or songs it makes a large part of
the test impossible, and the lists useless. So the log decides, by the share of repeats: from INCLUDE_FROM on, seen
items are candidates. The share is that of the validation items; the test items have no part in a choice.

Training agrees with it: where seen items are left out, a training event whose item the user has had before is no target
(`RepeatedEvents`). It would teach to recommend what is never recommended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbogr.data.split import Split
from turbogr.data.store import Store, read_range
from turbogr.data.vocabulary import Int64Array

INCLUDE_FROM = 0.2
"""Share of repeats from which seen items are candidates.

Leaving seen items out gives up all repeats: it bounds every hit rate by 1 - share. At a fifth that costs more than what
a good model gains over a simple one on most logs. Below, lists without what people know already are worth it.
"""


@dataclass(frozen=True)
class Repeats:
    """`num_repeated` of `num_items` items, one of each user, are items that the user has had before.

    `items` says which items these are.
    """

    items: str
    num_items: int
    num_repeated: int

    @property
    def share(self) -> float:
        return self.num_repeated / self.num_items

    @property
    def filter_seen(self) -> bool:
        """Whether seen items are left out of the candidates where no setting says so."""
        return self.share < INCLUDE_FROM

    def describe(self) -> str:
        """Say how many repeats there are."""
        if not self.num_repeated:
            return f"none of the {self.num_items:,} {self.items} is an item that the user has had before"
        verb, noun = ("is", "an item") if self.num_repeated == 1 else ("are", "items")
        found = f"{self.num_repeated:,} of {self.num_items:,} {self.items} ({self.share:.1%})"
        return f"{found} {verb} {noun} that the user has had before"

    def conclude(self, filter_seen: bool | None = None) -> str:
        """Say how many repeats there are and what follows: from the log, or from a setting `filter_seen`."""
        if filter_seen is None:
            cause = f"below {INCLUDE_FROM:.0%}, so" if self.filter_seen else f"{INCLUDE_FROM:.0%} or more, so"
        else:
            cause = f"as evaluate.filter_seen={str(filter_seen).lower()} says,"
        excluded = self.filter_seen if filter_seen is None else filter_seen
        missed = ", and a repeat counts as missed" if self.num_repeated else ""
        then = (
            f"seen items are left out{missed}" if excluded else "seen items are ranked and recommended like all others"
        )
        return f"{self.describe()}; {cause} {then}"

    def advise(self) -> str:
        """Say the same before a recipe is chosen: a recipe may leave the choice to the log or make it."""
        return f"{self.conclude()} (by recipes such as quickstart, which leave evaluate.filter_seen unset)"


class RepeatedEvents:
    """Which events of a store have an item that occurs earlier in the user's events; a bit for each event."""

    def __init__(self, store: Store) -> None:
        self._bits = np.zeros(-(-store.num_events // 8), np.uint8)
        for first, last in store.user_blocks():
            start, stop = int(store.offsets[first]), int(store.offsets[last])
            users = np.repeat(np.arange(last - first), np.diff(store.offsets[first : last + 1]))
            pairs = users * store.num_items + read_range(store.items, start, stop)
            order = np.argsort(pairs, kind="stable")
            flags = np.zeros(start % 8 + len(pairs), bool)  # begins where a byte begins
            flags[start % 8 + order[1:][pairs[order[1:]] == pairs[order[:-1]]]] = True
            packed = np.packbits(flags)
            self._bits[start // 8 : start // 8 + len(packed)] |= packed

    def of(self, events: Int64Array) -> NDArray[np.bool_]:
        """Return which of `events` [n], indices in the store, are repeats."""
        found: NDArray[np.bool_] = (self._bits[events >> 3] >> (7 - (events & 7)) & 1).astype(bool)
        return found


def count_repeats(store: Store, split: Split) -> Repeats | None:
    """Count the repeats among the validation items of a split.

    Where there are none, among the last training items of the users, which are as close to them as training events get;
    None where there are none of these either.
    """
    if (split.valid >= 0).any():
        return Repeats("validation items", *_count(store, split.valid))
    last = np.where(split.train_end - np.asarray(store.offsets[:-1]) >= 2, split.train_end - 1, -1)
    return Repeats("last training items of the users", *_count(store, last)) if (last >= 0).any() else None


def _count(store: Store, events: Int64Array) -> tuple[int, int]:
    """Return how many users have an event in `events` [U] (-1: none), and for how many its item is a repeat."""
    num_repeated = 0
    for first, last in store.user_blocks():
        start = int(store.offsets[first])
        items = read_range(store.items, start, int(store.offsets[last]))
        lengths = np.diff(store.offsets[first : last + 1])
        chosen = events[first:last] - start
        targets = np.where(chosen >= 0, items[np.maximum(chosen, 0)], -1) if len(items) else chosen
        before = np.arange(len(items)) < np.repeat(chosen, lengths)
        again = before & (items == np.repeat(targets, lengths))
        num_repeated += len(np.unique(np.repeat(np.arange(last - first), lengths)[again]))
    return int((events >= 0).sum()), num_repeated
