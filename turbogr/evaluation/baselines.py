"""Two baselines that a trained model must beat, measured on the same held-out items with the same filter.

Popularity scores an item by its number of training events. The Markov chain scores item j after the last item i by
c(i, j) + w · p(j). c(i, j) is how often j directly followed i in a user's training events. It is smoothed by w virtual
transitions that follow popularity p, so that after an unknown item the chain falls back to popularity. Scores are
compared as integers, so positions are exact; of equal scores the smaller item row comes first, as everywhere.

No array here has the size users × items or items × items: an item's position is its place in the order of popularity,
corrected for the few items that followed i and for the items that the user has seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from turbogr.data.ranges import cut_by_budget, offsets_of
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.metrics import MISSED

VIRTUAL_TRANSITIONS = 300  # the best of 1 to 10,000 on the validation items of MovieLens-1M and of KuaiRand-Pure
MAX_PAIRS = 1 << 24  # transitions held at once; a longer log is read in several passes
MAX_EVENTS = 1 << 22  # history events read at once

Stop = Callable[[], None]  # called from time to time during long work; may raise to end it


def popularity_positions(
    held_out: HeldOut, counts: Int64Array, *, stop: Stop | None = None
) -> tuple[Int64Array, Int64Array]:
    """Return the positions of the held-out items when items are ordered by their training `counts` [V].

    They are [n] int64 without the seen items and with them. Without, a held-out item that was seen has the position
    MISSED, here and in `markov_positions`.
    """
    popularity = _Popularity.of(counts)
    places = popularity.places[held_out.targets]
    among_all = places + 1
    among_unseen, everybody = among_all.copy(), np.arange(len(held_out))
    _filter_seen(among_unseen, held_out, everybody, lambda user, items: popularity.places[items] < places[user], stop)
    return among_unseen, among_all


def markov_positions(
    held_out: HeldOut,
    split: Split,
    counts: Int64Array,
    *,
    weight: int = VIRTUAL_TRANSITIONS,
    stop: Stop | None = None,
) -> tuple[Int64Array, Int64Array]:
    """Return the positions of the held-out items under the Markov chain of the training events.

    They are [n] int64 without the seen items and with them. `counts` [V] are the items' training events; `weight` is w
    above, a positive whole number.
    """
    store = held_out.store
    popularity = _Popularity.of(counts)
    last_items = store.items[held_out.events - 1].astype(np.int64)
    targets = held_out.targets
    among_unseen, among_all, target_scores = (np.empty(len(held_out), np.int64) for _ in range(3))
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
        among_unseen[asked] = among_all[asked] = 1 + chain.num_better(last_items[asked], scores, targets[asked])
        target_scores[asked] = scores
        better = functools.partial(chain.better, last_items, targets, target_scores)
        _filter_seen(among_unseen, held_out, asked, better, stop)
    return among_unseen, among_all


@dataclass(frozen=True)
class _Popularity:
    """Items in the order (count descending, row ascending).

    `places` [V] are the rows' places in that order, from 0; `keys` [V] are the items' sort keys, ascending.
    """

    counts: Int64Array
    places: Int64Array
    keys: Int64Array
    total: int

    @classmethod
    def of(cls, counts: Int64Array) -> _Popularity:
        # One integer per item holds both sort keys; it stays below 2^63 for any log that fits on a disk.
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
    """Transitions from some items to others, one entry per distinct pair, sorted in two ways.

    A score is c(i, j) · N + w · count(j), where N is the number of training events: N times the definition, an integer.
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
        """Return which `rows` come before the target of their user; sources, targets and their scores are by user."""
        found, wanted = self.scores(sources[users], rows), scores[users]
        before: NDArray[np.bool_] = (found > wanted) | ((found == wanted) & (rows < targets[users]))
        return before

    def num_better(self, sources: Int64Array, scores: Int64Array, rows: Int64Array) -> Int64Array:
        """Count the items that come before (score, row) after each source, seen or not."""
        num_items = len(self.popularity.counts)
        by_popularity = self.popularity.num_better(scores, rows, self.weight)
        begin = np.searchsorted(self.by_place, sources * num_items)
        # Items that followed the source have a score of their own, so they are counted by it and not by popularity.
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
    """Cut the item rows into ranges with at most MAX_PAIRS transitions from them (or a single item)."""
    return pairwise(cut_by_budget(offsets_of(counts), MAX_PAIRS).tolist())


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
    positions: Int64Array,
    held_out: HeldOut,
    asked: Int64Array,
    better: Callable[[Int64Array, Int64Array], NDArray[np.bool_]],
    stop: Stop | None,
) -> None:
    """Correct the `positions` of the `asked` users for the seen items, which are not candidates.

    `better(users, items)` returns which items come before the target of their user. A target that was seen is MISSED.
    """
    targets = held_out.targets
    missed = []
    for user, items in _seen_items(held_out, asked, stop):
        np.subtract.at(positions, user[better(user, items)], 1)
        missed.append(user[items == targets[user]])
    assert missed, "there is a user, and every user has a history"
    positions[np.concatenate(missed)] = MISSED


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
    """Return the distinct values, ascending, and how often each occurs; faster than np.unique, which hashes."""
    values = np.sort(values)
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else values
    return values[starts], np.diff(starts, append=len(values))
