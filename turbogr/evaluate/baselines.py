"""Two baselines that every trained model must beat, ranked on the same held-out items with the same filter.

Popularity scores an item by its number of training events. The Markov chain scores item j after last item i by
c(i, j) + w · p(j): the number of times j directly followed i in a user's training events, smoothed by w virtual
transitions that follow popularity, so that it falls back to popularity after an item it never saw. Both scores are
compared as integers, so ranks are exact, and ties go to the smaller item row as everywhere.

Nothing here is users × items or items × items: an item's rank is its place in the popularity order, corrected for the
few items that followed i and the items the user has seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluate.heldout import HeldOut
from turbogr.evaluate.metrics import MISSED

VIRTUAL_TRANSITIONS = 300  # the best of 1 to 10,000 on the validation items of MovieLens-1M and of KuaiRand-Pure
MAX_PAIRS = 1 << 24  # transitions held at once; a longer log is read in several passes
MAX_EVENTS = 1 << 22  # history events looked at at once

Stop = Callable[[], None]  # called now and then during long work; may raise to end it


def popularity_ranks(
    held_out: HeldOut, counts: Int64Array, *, filter_seen: bool = True, stop: Stop | None = None
) -> Int64Array:
    """Return the rank of every held-out item when items are ordered by their training `counts` [V], [n] int64.

    With `filter_seen` a held-out item that the filter removes has the rank MISSED, here as in `markov_ranks`.
    """
    popularity = _Popularity.of(counts)
    targets = held_out.targets
    places = popularity.places[targets]
    ranks = places + 1
    if filter_seen:
        everybody = np.arange(len(held_out))
        _filter_seen(ranks, held_out, everybody, lambda user, items: popularity.places[items] < places[user], stop)
    return ranks


def markov_ranks(
    held_out: HeldOut,
    split: Split,
    counts: Int64Array,
    *,
    filter_seen: bool = True,
    weight: int = VIRTUAL_TRANSITIONS,
    stop: Stop | None = None,
) -> Int64Array:
    """Return the rank of every held-out item under the Markov chain of the training events, [n] int64.

    `counts` [V] are the items' training events; `weight` is w above, a positive whole number.
    """
    store = held_out.store
    popularity = _Popularity.of(counts)
    last_items = store.items[held_out.events - 1].astype(np.int64)
    targets = held_out.targets
    ranks, target_scores = np.empty(len(held_out), np.int64), np.empty(len(held_out), np.int64)
    wanted = np.zeros(store.num_items, bool)
    wanted[last_items] = True
    for first, last in _source_ranges(np.where(wanted, counts, 0)):
        asked = np.flatnonzero((last_items >= first) & (last_items < last))
        if not len(asked):
            continue
        sources = wanted.copy()
        sources[:first], sources[last:] = False, False
        chain = _Chain.of(store, split, popularity, weight, sources, stop)
        scores = chain.scores(last_items[asked], targets[asked])
        ranks[asked] = 1 + chain.num_better(last_items[asked], scores, targets[asked])
        if filter_seen:
            target_scores[asked] = scores
            better = functools.partial(chain.better, last_items, targets, target_scores)
            _filter_seen(ranks, held_out, asked, better, stop)
    return ranks


@dataclass(frozen=True)
class _Popularity:
    """Items ordered by (count descending, row ascending): `places` [V] of the rows; `keys` [V] sorts that order."""

    counts: Int64Array
    places: Int64Array
    keys: Int64Array
    total: int

    @classmethod
    def of(cls, counts: Int64Array) -> _Popularity:
        # One integer per item carries both parts of the order; it stays below 2^63 for any log that fits on a disk.
        keys = (counts.max() - counts) * len(counts) + np.arange(len(counts))
        order = np.argsort(keys)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return cls(counts, places, keys[order], int(counts.sum()))

    def num_better(self, scores: Int64Array, rows: Int64Array, weight: int) -> Int64Array:
        """Count the items whose weight · count is above `scores`, or equal with a smaller row than `rows`."""
        whole, rest = np.divmod(scores, weight)
        most = int(self.counts.max())
        key = (most - np.minimum(whole, most + 1)) * len(self.counts) + np.where(rest == 0, rows, 0)
        places: Int64Array = np.searchsorted(self.keys, key)
        return places


@dataclass(frozen=True)
class _Chain:
    """Transitions out of some items, one entry per distinct pair, twice sorted.

    A score is c(i, j) · N + w · count(j) with N the number of training events: N times the definition, a whole number.
    `pairs` are i · V + j ascending with their counts; `by_place` i · V + place(j) ascending; `best_scores` and
    `best_rows` are ordered by (i, score descending, row ascending).
    """

    popularity: _Popularity
    weight: int
    pairs: Int64Array
    pair_counts: Int64Array
    by_place: Int64Array
    best_scores: Int64Array
    best_rows: Int64Array

    @classmethod
    def of(
        cls,
        store: Store,
        split: Split,
        popularity: _Popularity,
        weight: int,
        sources: NDArray[np.bool_],
        stop: Stop | None,
    ) -> _Chain:
        num_items = store.num_items
        parts = list(_transitions(store, split, sources, stop))
        pairs, counts = _distinct(np.concatenate(parts))
        source, row = np.divmod(pairs, num_items)
        scores = counts * popularity.total + weight * popularity.counts[row]
        by_place = np.sort(source * num_items + popularity.places[row])
        order = np.lexsort((row, -scores, source))
        return cls(popularity, weight, pairs, counts, by_place, scores[order], row[order])

    def scores(self, sources: Int64Array, rows: Int64Array) -> Int64Array:
        """Return the score of each row after its source."""
        scores = self.weight * self.popularity.counts[rows]
        if len(self.pairs):
            wanted = sources * len(self.popularity.counts) + rows
            place = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
            scores = scores + np.where(self.pairs[place] == wanted, self.pair_counts[place], 0) * self.popularity.total
        return scores

    def better(
        self, sources: Int64Array, targets: Int64Array, scores: Int64Array, users: Int64Array, rows: Int64Array
    ) -> NDArray[np.bool_]:
        """Say which `rows` stand before the target of their user; sources, targets and their scores are by user."""
        found, wanted = self.scores(sources[users], rows), scores[users]
        before: NDArray[np.bool_] = (found > wanted) | ((found == wanted) & (rows < targets[users]))
        return before

    def num_better(self, sources: Int64Array, scores: Int64Array, rows: Int64Array) -> Int64Array:
        """Count the items that come before (score, row) after each source, seen or not."""
        num_items = len(self.popularity.counts)
        by_popularity = self.popularity.num_better(scores, rows, self.weight)
        begin = np.searchsorted(self.by_place, sources * num_items)
        # Items that followed the source are judged by their own score instead of by popularity alone.
        counted_twice = np.searchsorted(self.by_place, sources * num_items + by_popularity) - begin
        low, high = begin.copy(), np.searchsorted(self.by_place, (sources + 1) * num_items)
        while (searching := low < high).any():
            middle = np.minimum((low + high) // 2, len(self.best_rows) - 1)
            score, row = self.best_scores[middle], self.best_rows[middle]
            better = (score > scores) | ((score == scores) & (row < rows))
            low = np.where(searching & better, middle + 1, low)
            high = np.where(searching & ~better, middle, high)
        better_followers: Int64Array = low - begin
        return by_popularity - counted_twice + better_followers


def _source_ranges(counts: Int64Array) -> Iterator[tuple[int, int]]:
    """Cut the item rows into ranges with at most MAX_PAIRS transitions out of them (or a single item)."""
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        done = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, done + MAX_PAIRS, side="right")), first + 1)
        yield first, last
        first = last


def _transitions(store: Store, split: Split, sources: NDArray[np.bool_], stop: Stop | None) -> Iterator[Int64Array]:
    """Yield i · V + j for every training event j that follows i, where i is one of the `sources` [V]."""
    for low, high in store.user_blocks(MAX_EVENTS):
        if stop is not None:
            stop()
        start, end = int(store.offsets[low]), int(store.offsets[high])
        items = np.asarray(store.items[start:end], np.int64)
        limit = np.repeat(split.train_end[low:high], np.diff(store.offsets[low : high + 1]))[:-1]
        follows = np.arange(start + 1, end) < limit
        follows &= sources[items[:-1]]
        yield (items[:-1] * store.num_items + items[1:])[follows]


def _filter_seen(
    ranks: Int64Array,
    held_out: HeldOut,
    asked: Int64Array,
    better: Callable[[Int64Array, Int64Array], NDArray[np.bool_]],
    stop: Stop | None,
) -> None:
    """Take the seen items out of the `ranks` of the `asked` users.

    `better(users, items)` says which items stand before the target of their user; a target that was seen is MISSED.
    """
    targets = held_out.targets
    missed = []
    for user, items in _seen_items(held_out, asked, stop):
        np.subtract.at(ranks, user[better(user, items)], 1)
        missed.append(user[items == targets[user]])
    assert missed, "somebody is asked, and everybody has a history"
    ranks[np.concatenate(missed)] = MISSED


def _seen_items(held_out: HeldOut, asked: Int64Array, stop: Stop | None) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield (user, item row), each pair once, for the history items of the `asked` users."""
    wanted = np.zeros(len(held_out), bool)
    wanted[asked] = True
    num_items = held_out.store.num_items
    for first, last in held_out.blocks(MAX_EVENTS):
        if stop is not None:
            stop()
        if not wanted[first:last].any():
            continue
        items, lengths = held_out.seen(first, last)
        user = np.repeat(np.arange(first, last), lengths)
        keep = wanted[user]
        pairs, _ = _distinct((user[keep] - first) * num_items + items[keep])
        user, items = np.divmod(pairs, num_items)
        yield user + first, items


def _distinct(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct values, ascending, and how often each occurs; np.unique hashes, which takes far longer."""
    values = np.sort(values)
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else values
    return values[starts], np.diff(starts, append=len(values))
