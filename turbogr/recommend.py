"""Recommendations of a trained run, for the users it was trained on and for any other history.

    recommender = turbogr.load("runs/mine")
    recommender.recommend([[("tt0111161", 1700000000), ("tt0068646", 1700000900)]], k=10)

Scores are cosines between the user's and the items' vectors. A history without a known item gets the most popular items
of the training events, with their share of these events as the score, and a warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.data.histories import History, Time, Unknown, read_histories, seconds_of
from turbogr.data.item_info import ItemInfo
from turbogr.data.ranges import concatenated_ranges
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import Note, UserError
from turbogr.evaluation.item_ranking import TILE, VectorScores, top_k
from turbogr.evaluation.job_pool import Step, run_jobs
from turbogr.evaluation.scorer import ModelScorer, batches_of
from turbogr.evaluation.user_histories import GivenHistories, StoreHistories
from turbogr.jagged import Jagged
from turbogr.runs import Which, open_run


def load(
    run: str | Path,
    *,
    data: str | Path | None = None,
    which: Which = "best",
    plugins: Sequence[str | Path] = (),
) -> Recommender:
    """Load a trained run to recommend from; see `open_run` for the arguments and what it raises."""
    opened = open_run(run, data=data, which=which, plugins=plugins)
    scorer = ModelScorer(opened.encoder, opened.max_len)
    return Recommender(scorer, opened.store, opened.split, filter_seen=opened.config.evaluate.excludes_seen)


@dataclass(frozen=True)
class Recommendations:
    """Lists of some users, one entry per recommended item; a user's entries are adjacent, the best item first.

    `positions` in a list start at 1. `num_users` counts the requested users; one who has seen every item has no entry.
    """

    user_ids: NDArray[Any]
    item_ids: NDArray[Any]
    positions: Int64Array
    scores: NDArray[np.float32]
    num_users: int

    @property
    def num_empty(self) -> int:
        """Number of users without an entry."""
        return self.num_users - int((self.positions == 1).sum())

    @property
    def ranks(self) -> Int64Array:
        """`positions` by the name that they had in 0.1.0."""
        warnings.warn("Recommendations.ranks is now Recommendations.positions", DeprecationWarning, stacklevel=2)
        return self.positions


class Recommender:
    """Recommends from the whole catalogue, exactly; of items with equal scores the smaller row comes first.

    `filter_seen` is whether items of the history are left out where a call does not say so; for a loaded run, whether
    they were left out when it was measured.
    """

    def __init__(self, scorer: ModelScorer, store: Store, split: Split, *, filter_seen: bool = True) -> None:
        assert scorer.num_items == store.num_items, f"{scorer.num_items} scores for {store.num_items} items"
        self.scorer, self.store, self.split, self.filter_seen = scorer, store, split, filter_seen

    def recommend(
        self,
        histories: Iterable[History],
        k: int = 10,
        *,
        filter_seen: bool | None = None,
        at: Time | Sequence[Time] | None = None,
        unknown: Unknown = "warn",
    ) -> list[list[tuple[Any, float]]]:
        """Return the k best (raw item, score) for each history, best first, fewer if the catalogue has no more.

        A history is a sequence of (raw item, time) in any order; its user need not have been in training. Times are
        seconds since 1970 or datetimes (UTC unless they say otherwise). The model reads the last `max_len` events. With
        `filter_seen`, none of the history's items is recommended; None does what the run's metrics measured. `at` is
        the time of the request, one for all or one per history; by default that of the history's last event. Items that
        the model does not know are left out, with a warning (unknown="warn") or silently ("skip"), or are an error
        ("raise").

        Raises:
            UserError: a history or a time that cannot be read, a request before the history's last event, a k below 1,
                or an unknown item with unknown="raise".
        """
        k = _checked_k(k, self.store.num_items)
        filter_seen = self.filter_seen if filter_seen is None else filter_seen
        read = read_histories(histories, at, self.store, unknown)
        lists: list[list[tuple[Any, float]]] = [[] for _ in read.items]
        empty = [place for place, items in enumerate(read.items) if not len(items)]
        if empty:
            warnings.warn(
                f"{len(empty)} of {len(read.items)} histories have no item that the model knows (the first is number "
                f"{empty[0]}); they get the most popular items",
                stacklevel=2,
            )
            for place in empty:
                lists[place] = self._decode(*self._most_popular(k))
        known = [place for place, items in enumerate(read.items) if len(items)]

        def work(chosen: slice, step: Step) -> tuple[Tensor, Tensor]:
            items, times = ([column[place] for place in known[chosen]] for column in (read.items, read.times))
            scores = self.scorer.score(GivenHistories(items, times, read.request_times[known[chosen]]), step)
            seen = Jagged.from_rows([torch.from_numpy(row) for row in items]).to(scores.device)
            return top_k(scores, k, seen if filter_seen else None)

        jobs = batches_of(len(known), TILE)
        for chosen, (scores, rows) in zip(jobs, run_jobs(work, jobs, num_workers=self._workers(jobs)), strict=True):
            for place, score, row in zip(known[chosen], scores.cpu().numpy(), rows.cpu().numpy(), strict=True):
                lists[place] = self._decode(score, row)
        return lists

    def recommend_users(
        self,
        user_ids: Sequence[Any] | NDArray[Any] | None = None,
        k: int = 10,
        *,
        filter_seen: bool | None = None,
        at: Time | None = None,
        unknown: Unknown = "raise",
        batch_size: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Generator[Recommendations, None, None]:
        """Yield the k best items for users of the store, some users at a time: all users, or those of `user_ids`.

        A user's whole history is used, with the held-out events. Arguments as in `recommend` and `evaluate`; memory use
        does not grow with the number of users.

        Raises:
            UserError: a user that the store does not have (unless `unknown` says otherwise), a k below 1, or an `at`
                before a user's last event.
        """
        k = _checked_k(k, self.store.num_items)
        filter_seen = self.filter_seen if filter_seen is None else filter_seen
        users = np.arange(self.store.num_users) if user_ids is None else self._known_users(user_ids, unknown)
        request_time = None if at is None else seconds_of(at, "at")
        batch_size = batch_size or self.scorer.batch_size
        jobs = batches_of(len(users), batch_size)

        def work(chosen: slice, step: Step) -> Recommendations:
            return self._recommend_rows(users[chosen], k, filter_seen, request_time, step)

        return run_jobs(work, jobs, num_workers=self._workers(jobs), progress=progress)

    def similar_items(self, item: Any, k: int = 10) -> list[tuple[Any, float]]:
        """Return the k other items whose vectors are closest to that of a raw `item`, with their cosines.

        Raises:
            UserError: an unknown item, or a k below 1.
        """
        k = _checked_k(k, self.store.num_items)
        row = int(self.store.item_ids.encode([item])[0])
        if row < 0:
            raise UserError(f"the model does not know the item {item!r}; it has {self.store.num_items:,} others")
        encoder = self.scorer.encoder
        vector = encoder.item_rows(row, row + 1)
        itself = Jagged(torch.tensor([row]), torch.tensor([0, 1])).to(vector.device)
        scores, rows = top_k(VectorScores(vector, encoder), k, itself)
        return self._decode(scores[0].cpu().numpy(), rows[0].cpu().numpy())

    @functools.cached_property
    def item_info(self) -> ItemInfo | None:
        """Titles and other columns of the items, None if the store has none."""
        return ItemInfo.of(self.store)

    def titles(self, items: Sequence[Any] | NDArray[Any]) -> list[str | None]:
        """Return the titles of raw items, None where the store has no title."""
        return [None] * len(items) if self.item_info is None else self.item_info.titles_of(items)

    def __repr__(self) -> str:
        return f"Recommender({self.store.num_items:,} items, {self.store.num_users:,} users)"

    def _recommend_rows(
        self, users: Int64Array, k: int, filter_seen: bool, at: int | None, step: Step
    ) -> Recommendations:
        starts, ends = np.asarray(self.store.offsets)[users], np.asarray(self.store.offsets)[users + 1]
        some = np.flatnonzero(ends > starts)
        scores, rows = np.empty((len(users), k), np.float32), np.empty((len(users), k), np.int64)
        if len(some) < len(users):
            scores[:], rows[:] = self._most_popular(k)
        if len(some):
            starts, ends = starts[some], ends[some]
            last_times = np.asarray(self.store.times[ends - 1])
            times = last_times + self._to_next if at is None else np.full(len(some), at)
            if (times < last_times).any():
                late = self.store.user_ids.decode(users[some[times < last_times]][:1])[0]
                raise UserError(
                    f"at is {at}, before the last event of user {late!r}; leave it out or give a later time"
                )
            histories = StoreHistories(self.store, users[some], ends, times)
            found_scores = self.scorer.score(histories, step)
            seen = None
            if filter_seen:
                items = self.store.items[concatenated_ranges(starts, ends - starts)].astype(np.int64)
                seen = Jagged.from_lengths(torch.from_numpy(items), torch.from_numpy(ends - starts)).to(
                    found_scores.device
                )
            found, found_rows = top_k(found_scores, k, seen)
            scores[some], rows[some] = found.cpu().numpy(), found_rows.cpu().numpy()
        kept = rows >= 0
        place, column = np.nonzero(kept)
        return Recommendations(
            self.store.user_ids.decode(users[place]),
            self.store.item_ids.decode(rows[kept]),
            column + 1,
            scores[kept],
            len(users),
        )

    def _known_users(self, user_ids: Sequence[Any] | NDArray[Any], unknown: Unknown) -> Int64Array:
        rows = self.store.user_ids.encode(user_ids)
        missing = np.flatnonzero(rows < 0)
        if len(missing) and unknown != "skip":
            shown = ", ".join(repr(_plain(user_ids[int(place)])) for place in missing[:3])
            sentence = f"{len(missing):,} of {len(rows):,} users are not in {self.store.path}: {shown}"
            sentence += ", ..." if len(missing) > 3 else ""
            if unknown == "raise":
                raise UserError(f"{sentence}; give their histories to recommend(), or skip them")
            warnings.warn(f"{sentence}; they are left out", stacklevel=3)
        return rows[rows >= 0]

    @property
    def _to_next(self) -> int:
        """Default time from the last event to the request: 1 if times are positions in the history, else 0."""
        return 1 if self.store.manifest.times == "positions" else 0

    def _most_popular(self, k: int) -> tuple[NDArray[np.float32], Int64Array]:
        """Return the scores and rows of the k most popular items, padded like those of `top_k`."""
        shares, order = self._popularity
        scores = np.full(k, -np.inf, np.float32)
        rows = np.full(k, -1, np.int64)
        num = min(k, len(order))
        scores[:num], rows[:num] = shares[:num], order[:num]
        return scores, rows

    @functools.cached_property
    def _popularity(self) -> tuple[NDArray[np.float32], Int64Array]:
        counts = self.store.item_counts(self.split.train_end)
        order = np.argsort(-counts, kind="stable")
        return (counts[order] / max(1, counts.sum())).astype(np.float32), order

    def _workers(self, jobs: Sequence[slice]) -> int:
        return max(1, min(self.scorer.num_workers, len(jobs)))

    def _decode(self, scores: NDArray[np.float32], rows: Int64Array) -> list[tuple[Any, float]]:
        kept = rows >= 0
        return list(zip(self.store.item_ids.decode(rows[kept]).tolist(), scores[kept].tolist(), strict=True))


def _checked_k(k: Any, num_items: int) -> int:
    """Return k, or the size of the catalogue if that is smaller, with a note."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise UserError(f"k is {k!r}; give a whole number of items, at least 1")
    if k > num_items:
        warnings.warn(
            f"k is {k:,}, but there are {num_items:,} items; lists have no more than that", Note, stacklevel=3
        )
    return min(int(k), num_items)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
