"""Ranking given candidates with a trained run of the task 'ranking': what each user would do with each of them.

    ranker = turbogr.load_ranker("runs/ranking")
    ranker.rank(pairs, k=10)                 # a table with a user and an item per candidate

Candidates are sorted by a weighted sum of the predicted tasks. Their features of events (such as the page they are
shown on) are columns of the table; those that it does not have count as not given. A user that the store does not have
is one without a history.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from turbogr.data.dataframes import Kind, check_kind, from_arrow, ids_array, kind_of
from turbogr.data.event_table import NamedColumns, column_of, find_column, read_times
from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.histories import Time, Unknown, check_unknown, report_unknown, seconds_of
from turbogr.data.prepare.sources.memory_table import as_arrow, column_names
from turbogr.data.ranges import cut_by_budget, offsets_of
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import Note, UserError, did_you_mean, warn_caller
from turbogr.jagged import Jagged
from turbogr.recommend import Recommendations, check_k
from turbogr.runs import OpenedRun, Which, open_run
from turbogr.tasks.ranking import RankingTask
from turbogr.tasks.ranking_requests import RankingRequests

_CANDIDATES_AT_ONCE = 1 << 17

Weights = Mapping[str, float]


def load_ranker(
    run: str | Path,
    *,
    data: str | Path | None = None,
    which: Which = "best",
    plugins: Sequence[str | Path] = (),
    device: str = "auto",
) -> Ranker:
    """Load a trained ranking run to rank candidates with; see `open_run` for the arguments and what it raises."""
    return Ranker(open_run(run, data=data, which=which, plugins=plugins, device=device))


@dataclass(frozen=True)
class RankedCandidates(Recommendations):
    """`predictions` of every entry by task: a probability, or a number in its unit; `times` of requests if given."""

    predictions: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    times: Int64Array | None = None


@dataclass(frozen=True)
class _Requests:
    """Users and times with their candidates: `items` are rows of the store, `features` by the store's key."""

    user_ids: NDArray[Any]
    users: Int64Array
    times: Int64Array | None
    items: Jagged
    features: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def part(self, chosen: slice) -> _Requests:
        offsets = self.items.offsets
        first, last = int(offsets[chosen.start]), int(offsets[chosen.stop])
        return _Requests(
            self.user_ids[chosen],
            self.users[chosen],
            None if self.times is None else self.times[chosen],
            Jagged(self.items.values[first:last], offsets[chosen.start : chosen.stop + 1] - first),
            {key: values[first:last] for key, values in self.features.items()},
        )


class Ranker:
    """Ranks candidates by what a model predicts; a prediction does not depend on the other candidates."""

    def __init__(self, opened: OpenedRun) -> None:
        if not isinstance(opened.task, RankingTask):
            raise UserError(
                f"{opened.folder.path} is a run of the task '{opened.task.name}', not of 'ranking'; use `turbogr.load`"
            )
        self.task: RankingTask = opened.task
        self.opened, self.store = opened, opened.store

    def rank(
        self,
        candidates: Any,
        k: int | None = None,
        *,
        by: Weights | None = None,
        at: Time | None = None,
        unknown: Unknown = "warn",
        output: Kind | None = None,
        user_column: str | None = None,
        item_column: str | None = None,
        time_column: str | None = None,
    ) -> Any:
        """Return every user's candidates, the best first, as a table with user_id, item_id, rank, score and the tasks.

        Args:
            candidates: a table with a user and an item column, maybe the time of the request, and features of events by
                their names in the log. Candidates of one user at one time are ranked together.
            k: candidates per list; None: all.
            by: weights of the tasks in the score; None: the first task of the recipe.
            at: the time of all requests. Without it and without a time column a request is a second after the user's
                last event. Only events before it are seen.
            unknown: what to do with items that the store does not have: "raise", "warn" and leave them out, or "skip".
            output: "pandas", "polars" or "arrow"; None: like the input.

        Raises:
            UserError: something cannot be read, an unknown task, or no candidate that the store has.
        """
        columns = NamedColumns(user_column, item_column, time_column)
        kind: Kind = output or kind_of(candidates) or "arrow"
        check_kind(kind)
        found = list(self.rank_batches(candidates, k, by=by, at=at, unknown=unknown, columns=columns))
        return from_arrow(_table(found, self.task), kind)

    def rank_batches(
        self,
        candidates: Any,
        k: int | None = None,
        *,
        by: Weights | None = None,
        at: Time | None = None,
        unknown: Unknown = "warn",
        columns: NamedColumns | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Generator[RankedCandidates, None, None]:
        """Yield what `rank` returns, some requests at a time; `progress` is called with the number of requests done."""
        weights = self.weights(by)
        if k is not None:
            check_k(k)
        requests = self._read(candidates, at, unknown, columns or NamedColumns())
        return self._rank(requests, k, weights, progress)

    def rank_items(
        self,
        users: Any,
        items: Any,
        k: int | None = None,
        *,
        by: Weights | None = None,
        at: Time | None = None,
        unknown: Unknown = "warn",
        progress: Callable[[int], None] | None = None,
    ) -> Generator[RankedCandidates, None, None]:
        """Yield the ranking of the same raw `items` for each of the raw `users` (None: all users of the store)."""
        weights = self.weights(by)
        if k is not None:
            check_k(k)
        owners = np.arange(self.store.num_users) if users is None else self._known_users(_raw(users, "users"))
        rows = self._known_items(ids_array(list(items), "items"), unknown)
        each = np.unique(rows[rows >= 0])
        self._warn_of_missing_features([])
        at_once = max(1, _CANDIDATES_AT_ONCE // len(each))
        for first in range(0, len(owners), at_once):
            some = owners[first : first + at_once]
            lengths = torch.full((len(some),), len(each), dtype=torch.int64)
            shown = Jagged.from_lengths(torch.from_numpy(np.tile(each, len(some))), lengths)
            requests = _Requests(self.store.user_ids.decode(some), some, _at(at, len(some)), shown)
            yield from self._rank(requests, k, weights, progress)

    def rerank(
        self,
        lists: Iterable[Recommendations],
        k: int,
        *,
        by: Weights | None = None,
        at: Time | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Generator[RankedCandidates, None, None]:
        """Yield the k best of every list that another recommender has found, of items that the store has."""
        weights = self.weights(by)
        check_k(k)
        self._warn_of_missing_features([])
        num_unknown = 0
        for found in lists:
            rows = self.store.item_ids.encode(_as_ids(found.item_ids))
            known = rows >= 0
            num_unknown += int((~known).sum())
            first = np.flatnonzero(found.positions == 1)
            owner = np.cumsum(found.positions == 1) - 1
            lengths = np.bincount(owner[known], minlength=len(first)).astype(np.int64)
            ids = found.user_ids[first]
            items = Jagged.from_lengths(torch.from_numpy(rows[known]), torch.from_numpy(lengths))
            users = self.store.user_ids.encode(_as_ids(ids)) if len(ids) else np.zeros(0, np.int64)
            requests = _Requests(ids, users, _at(at, len(ids)), items)
            yield from self._rank(requests, k, weights, progress, found.num_users)
        if num_unknown:
            warn_caller(f"{num_unknown:,} candidates are items that {self.store.path} does not have; they are left out")

    def weights(self, by: Weights | None) -> dict[str, float]:
        """Return the weight of each task in the score.

        Raises:
            UserError: a task that the run does not have, or no weight that is not 0.
        """
        known = list(self.task.ranking.tasks)
        for name in by or ():
            if name not in known:
                raise UserError(
                    f"the run predicts {', '.join(known)}, not '{name}'.{did_you_mean(name, known)} Choose among these"
                )
        weights = {known[0]: 1.0} if by is None else {name: float(weight) for name, weight in by.items()}
        if not any(weights.values()) or not all(np.isfinite(weight) for weight in weights.values()):
            raise UserError(f"the weights of the score are {dict(weights)}; give a finite one that is not 0")
        return weights

    # Reading.

    def _read(self, table: Any, at: Time | None, unknown: Unknown, columns: NamedColumns) -> _Requests:
        check_unknown(unknown)
        what = "the table of candidates"
        names = column_names(table)
        time = find_column("time", names, self.store, columns, what)
        if time is not None and at is not None:
            raise UserError(f"{what} has times in column {time!r}, and `at` is a time for all; leave one of them out")
        users = column_of("user", table, self.store, columns, what)
        rows = self._known_items(column_of("item", table, self.store, columns, what), unknown)
        times = np.zeros(len(rows), np.int64)
        if time is not None:
            ticks, per_second = read_times(table, time)
            times = ticks // per_second
        encoded = users.dictionary_encode()
        owner = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        kept = np.flatnonzero(rows >= 0)
        order = kept[np.lexsort((kept, rows[kept], times[kept], owner[kept]))]
        same = np.zeros(len(order), bool)
        same[1:] = (np.diff(owner[order]) == 0) & (np.diff(times[order]) == 0) & (np.diff(rows[order]) == 0)
        if same.any():
            warn_caller(f"{int(same.sum()):,} candidates are there twice for their user; each is ranked once", Note)
        order = order[~same]
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(owner[order]) != 0) | (np.diff(times[order]) != 0)
        starts = np.flatnonzero(new)
        lengths = np.diff(starts, append=len(order)).astype(np.int64)
        ids = encoded.dictionary.take(pa.array(owner[order][starts]))
        found = self.store.user_ids.encode(ids)
        if (found < 0).any():
            warn_caller(
                f"{int((found < 0).sum()):,} of {len(found):,} users are not in {self.store.path}; their candidates "
                "are ranked as those of a user without a history"
            )
        shown = [feature for feature in self._event_columns() if feature.name in names]
        self._warn_of_missing_features([feature.name for feature in shown])
        features = {feature.key: _feature_values(feature, table, what)[order] for feature in shown}
        return _Requests(
            ids.to_numpy(zero_copy_only=False),
            found,
            times[order][starts] if time is not None else _at(at, len(starts)),
            Jagged.from_lengths(torch.from_numpy(rows[order]), torch.from_numpy(lengths)),
            features,
        )

    def _known_items(self, ids: pa.Array, unknown: Unknown) -> Int64Array:
        rows = self.store.item_ids.encode(ids)
        report_unknown(ids, rows, unknown, "candidates are")
        if not (rows >= 0).any():
            raise UserError(f"none of the {len(rows):,} candidates is an item of {self.store.path}; check the ids")
        return rows

    def _known_users(self, ids: NDArray[Any]) -> Int64Array:
        rows = self.store.user_ids.encode(_as_ids(ids))
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            warn_caller(
                f"{len(missing):,} of {len(rows):,} users are not in {self.store.path}, such as "
                f"{str(ids[missing[0]])!r}; they are left out"
            )
        return rows[rows >= 0]

    def _event_columns(self) -> list[FeatureColumn]:
        """The features of events that the model sees and a table of candidates may have."""
        keys = dict.fromkeys(feature.column for feature in self.task.item_features if feature.owner == "event")
        columns = [self.store.features[key] for key in keys if key in self.store.features]
        return [column for column in columns if column.info.kind in ("category", "number")]

    def _warn_of_missing_features(self, given: Sequence[str]) -> None:
        missing = [column.name for column in self._event_columns() if column.name not in given]
        if missing:
            warn_caller(
                f"the candidates do not have {', '.join(missing)}, which the model knows of events; it counts as not "
                "given. A table of candidates may have it as a column",
                Note,
            )

    # Ranking.

    def _rank(
        self,
        requests: _Requests,
        k: int | None,
        weights: Weights,
        progress: Callable[[int], None] | None,
        num_users: int | None = None,
    ) -> Generator[RankedCandidates, None, None]:
        bounds = cut_by_budget(requests.items.offsets.numpy(), _CANDIDATES_AT_ONCE).tolist()
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            chosen = slice(first, last)
            # Users without a candidate are counted with the first part.
            extra = (num_users or len(requests.users)) - len(requests.users) if number == 0 else 0
            yield self._rank_part(requests.part(chosen), k, weights, first, extra)
            if progress is not None:
                progress(last - first)

    def _rank_part(
        self, part: _Requests, k: int | None, weights: Weights, place: int, num_without: int
    ) -> RankedCandidates:
        times = self._latest(part.users) + 1 if part.times is None else part.times
        ends = self._ends(part.users, times)
        asked = RankingRequests(part.users, ends, times, part.items, event_features=part.features)
        predicted = self.task.predict(self.opened.tables, self.store, asked)
        score = np.sum([weight * predicted[name] for name, weight in weights.items()], axis=0).astype(np.float32)
        rows = part.items.values.numpy()
        lengths = part.items.lengths.numpy()
        owner = np.repeat(np.arange(len(part.users)), lengths)
        order = np.lexsort((rows, -score, owner))
        position = np.arange(len(order)) - np.repeat(offsets_of(lengths)[:-1], lengths) + 1
        kept = slice(None) if k is None else position <= k
        order = order[kept]
        return RankedCandidates(
            part.user_ids[owner[order]],
            self.store.item_ids.decode(rows[order]),
            position[kept],
            score[order],
            len(part.users) + num_without,
            place + owner[order],
            {name: values[order] for name, values in predicted.items()},
            None if part.times is None else times[owner[order]],
        )

    def _latest(self, users: Int64Array) -> Int64Array:
        """Return the time of each user's last event, that of the log's last one for users without any."""
        newest = int(np.asarray(self.store.times).max(initial=0))
        if not self.store.num_events:
            return np.full(len(users), newest, np.int64)
        offsets = np.asarray(self.store.offsets)
        ends = offsets[np.maximum(users, 0) + 1]
        has = (users >= 0) & (ends > offsets[np.maximum(users, 0)])
        return np.where(has, np.asarray(self.store.times[np.maximum(ends - 1, 0)]), newest).astype(np.int64)

    def _ends(self, users: Int64Array, times: Int64Array) -> Int64Array:
        """Return behind which event of the store each request is made: the first that is not before its time."""
        offsets = np.asarray(self.store.offsets)
        ends = np.where(users >= 0, offsets[np.maximum(users, 0) + 1], 0)
        for place in np.flatnonzero((users >= 0) & (times <= self._latest(users))).tolist():
            first, last = int(offsets[users[place]]), int(offsets[users[place] + 1])
            ends[place] = first + int(np.searchsorted(self.store.times[first:last], times[place]))
        return ends.astype(np.int64)


def _at(at: Time | None, num: int) -> Int64Array | None:
    return None if at is None else np.full(num, seconds_of(at, "at"), np.int64)


def _raw(values: Any, what: str) -> NDArray[Any]:
    found: NDArray[Any] = ids_array(values, what).to_numpy(zero_copy_only=False)
    return found


def _as_ids(values: NDArray[Any]) -> Any:
    return ids_array(values, "ids") if len(values) else np.zeros(0, np.int64)


def _feature_values(column: FeatureColumn, table: Any, what: str) -> NDArray[Any]:
    """Return a feature of the candidates as the store's column has it.

    Raises:
        UserError: text in a column of numbers.
    """
    values = as_arrow(table, [column.name]).column(0).combine_chunks()
    if column.info.kind == "category":
        assert column.vocabulary is not None
        given = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        codes = np.full(len(values), -1, np.int32)
        codes[given] = column.vocabulary.encode(values.take(pa.array(given)).cast(pa.string()))
        if (codes[given] < 0).any():
            first = values[int(given[codes[given] < 0][0])].as_py()
            warn_caller(
                f"{what}: {int((codes[given] < 0).sum()):,} records have a value of '{column.name}' that the log does "
                f"not have, such as {first!r}; it counts as not given"
            )
        return codes
    try:
        text = pc.utf8_trim_whitespace(values) if pa.types.is_string(values.type) else values
        text = pc.if_else(pc.equal(text, ""), None, text) if pa.types.is_string(text.type) else text
        numbers = text.cast(pa.float32()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise UserError(f"{what}: column '{column.name}' must have numbers: {str(error).splitlines()[0]}") from error
    return np.where(np.isfinite(numbers), numbers, np.nan).astype(np.float32)


def _table(parts: Sequence[RankedCandidates], task: RankingTask) -> pa.Table:
    def joined(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(values) if values else np.zeros(0)

    columns = {
        "user_id": ids_array(joined([part.user_ids for part in parts]), "user_id"),
        "item_id": ids_array(joined([part.item_ids for part in parts]), "item_id"),
        "rank": pa.array(joined([part.positions for part in parts]).astype(np.int32)),
        "score": pa.array(joined([part.scores for part in parts]).astype(np.float32)),
    }
    if parts and parts[0].times is not None:
        columns["time"] = pa.array(joined([part.times for part in parts if part.times is not None]))
    for name in task.ranking.tasks:
        columns[name] = pa.array(joined([part.predictions[name] for part in parts]).astype(np.float32))
    return pa.table(columns)
