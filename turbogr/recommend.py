"""Recommendations of a trained run, for the users it was trained on and for anybody else.

    model = turbogr.load("runs/mine")
    model.recommend(["alice", "bob"], k=10)                        # users of the training data
    model.recommend([["tt0111161", "tt0068646"]], k=10)            # histories, with or without times
    model.recommend(events, k=10)                                  # a table of events, new users welcome

The scores of a trained model are cosines between the user's and the items' vectors. A run may deliver a simple method
or a sum of several instead (`Recommender.delivered`), with scores of its own. A history without a known item gets the
most popular items of the training events, with their share of these events as the score, and a warning.
"""

from __future__ import annotations

import functools
import secrets
import shutil
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.api import RunEvaluation, evaluate
from turbogr.data.dataframes import check_kind, from_arrow, ids_array, is_table, kind_of
from turbogr.data.event_table import NamedColumns, column_of
from turbogr.data.histories import Time, TypicalTimes, Unknown
from turbogr.data.item_info import ItemInfo
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import Note, UserError, warn_caller
from turbogr.evaluation.candidates import CandidateScores
from turbogr.evaluation.item_ranking import MatrixScores, Scores, VectorScores, top_k
from turbogr.evaluation.job_pool import Step, run_jobs
from turbogr.evaluation.scorer import ModelScorer, Scorer, batches_of
from turbogr.item_filters import ItemFilters, read_filters
from turbogr.jagged import Jagged
from turbogr.requested_users import GivenUsers, Output, Request, RequestedUsers, StoreUsers, read_request
from turbogr.runs import OpenedRun, RunFolder, Which, open_run
from turbogr.training.run_summary import read_summary
from turbogr.training.trainer import TrainResult

_ITEM_PIECE = 1 << 14  # item rows read at once

Ranked = list[tuple[Any, float]]
"""Raw items with their scores, the best first."""


def load(
    run: str | Path,
    *,
    data: str | Path | None = None,
    which: Which = "best",
    plugins: Sequence[str | Path] = (),
    device: str = "auto",
) -> Recommender:
    """Load a trained run to recommend from; see `open_run` for the arguments and what it raises."""
    opened = open_run(run, data=data, which=which, plugins=plugins, device=device)
    model = None if opened.config.method is not None else ModelScorer(opened.encoder, opened.max_len)
    return Recommender(
        opened.recommender,
        opened.store,
        opened.split,
        model=model,
        filter_seen=opened.config.evaluate.excludes_seen,
        opened=opened,
    )


@dataclass(frozen=True)
class Recommendations:
    """Lists of some users, one entry per recommended item; a user's entries are adjacent, the best item first.

    `positions` in a list start at 1. `num_users` counts the requested users; one who has seen every item has no entry.
    `places` are those of the entries' users in the request, from 0.
    """

    user_ids: NDArray[Any]
    item_ids: NDArray[Any]
    positions: Int64Array
    scores: NDArray[np.float32]
    num_users: int
    places: Int64Array

    @property
    def num_empty(self) -> int:
        """Number of users without an entry."""
        return self.num_users - int((self.positions == 1).sum())

    @property
    def ranks(self) -> Int64Array:
        """`positions` by the name that they had in 0.1.0."""
        warnings.warn("Recommendations.ranks is now Recommendations.positions", DeprecationWarning, stacklevel=2)
        return self.positions


class Vectors(NamedTuple):
    """Raw `ids` [n] and the float32 `matrix` [n, d] of their vectors, of length 1."""

    ids: NDArray[Any]
    matrix: NDArray[np.float32]


class Recommender:
    """Recommends from the whole catalogue, exactly; of items with equal scores the smaller row comes first.

    `scorer` ranks the items. `model` is the trained model if there is one; vectors come from it. `filter_seen` is
    whether items of the history are left out where a call does not say so; for a loaded run, whether they were left out
    when it was measured. `opened` is the run that it was loaded from; `result` is how its training ended, if
    `turbogr.train` has made it.
    """

    def __init__(
        self,
        scorer: Scorer,
        store: Store,
        split: Split,
        *,
        filter_seen: bool = True,
        model: ModelScorer | None = None,
        opened: OpenedRun | None = None,
    ) -> None:
        assert scorer.num_items == store.num_items, f"{scorer.num_items} scores for {store.num_items} items"
        self.scorer, self.store, self.split, self.filter_seen = scorer, store, split, filter_seen
        self.model = scorer if model is None and isinstance(scorer, ModelScorer) else model
        self._opened = opened
        self.result: TrainResult | None = None

    @property
    def precision(self) -> str:
        """What the model computes in: `train.precision` of its run."""
        return "fp32" if self._opened is None else self._opened.config.train.precision

    def recommend(
        self,
        who: Any = None,
        k: int = 10,
        *,
        users: Any = None,
        histories: Any = None,
        include: Any = None,
        exclude: Any = None,
        include_by_user: Any = None,
        exclude_by_user: Any = None,
        filter_seen: bool | None = None,
        at: Time | Sequence[Time] | None = None,
        unknown: Unknown | None = None,
        output: Output | None = None,
        user_column: str | None = None,
        item_column: str | None = None,
        time_column: str | None = None,
        item_columns: Sequence[str] = (),
    ) -> Any:
        """Return the k best items of some users, best first, fewer if there are no more candidates.

        Args:
            who: raw ids of users of the training data, as a list, a column or a table, or one id; histories, as a list
                of lists or a mapping from users to lists; or a table of events with a user, an item and maybe a time
                column. None: all users of the training data. `users` and `histories` are the same, and say what it is.
            k: items per user; more than the candidates means all of them.
            include, exclude: items that everybody's candidates are restricted to, and items that nobody gets.
            include_by_user, exclude_by_user: the same for single users, as a mapping from a user to items, or a table
                with a user and an item column; other users are not affected.
            filter_seen: leave out the items of the user's own history; None: as the run's metrics measured.
            at: the time of the request, one for all or one per history; by default that of the last event.
            unknown: what to do with unknown users and with items that the model does not know: "raise", "warn" and
                leave them out, or "skip" them. By default users raise and items warn.
            output: "pandas", "polars" or "arrow": a table with the columns user_id, item_id, rank, score, and title if
                the store has titles; "lists": a list of (item, score) per user; "dict": such lists by user. By default
                like the input: a table for a table, lists for a list, a dict for a mapping, one list for one user; for
                all users a table, of pandas if it is installed.
            user_column, item_column, time_column: columns of tables; by default found by their names.
            item_columns: columns about the items (`Recommender.item_info`) that a returned table has beside the title.

        A history is a list of items, oldest first, or of (item, time) pairs in any order; its user need not have been
        in training. Times are seconds since 1970, datetimes or ISO text (UTC unless they say otherwise). Without times
        the last event is at the newest time of the training data, and earlier ones are as old as in a typical history.

        Raises:
            UserError: something cannot be read, is unknown, or a request lies before the history's last event.
        """
        request = self._read(who, users, histories, at, unknown, NamedColumns(user_column, item_column, time_column))
        filters = read_filters(
            self.store,
            include=include,
            exclude=exclude,
            include_by_user=include_by_user,
            exclude_by_user=exclude_by_user,
            unknown=unknown or "warn",
            columns=NamedColumns(user_column, item_column),
        )
        if output is not None:
            check_kind(output, ("lists", "dict", "one"))
        found = list(self._batches(request.users, k, filters, filter_seen, None, None))
        return self._output(found, request, output or request.output, item_columns)

    def recommend_batches(
        self,
        who: Any = None,
        k: int = 10,
        *,
        users: Any = None,
        histories: Any = None,
        filter_seen: bool | None = None,
        at: Time | Sequence[Time] | None = None,
        unknown: Unknown | None = None,
        batch_size: int | None = None,
        progress: Callable[[int], None] | None = None,
        user_column: str | None = None,
        item_column: str | None = None,
        time_column: str | None = None,
        **filters: Any,
    ) -> Generator[Recommendations, None, None]:
        """Yield what `recommend` returns, some users at a time, so that memory does not grow with their number.

        Arguments as in `recommend`; `filters` are include, exclude, include_by_user and exclude_by_user. `progress` is
        called with the number of users done since its last call.

        Raises:
            UserError: as `recommend`.
        """
        columns = NamedColumns(user_column, item_column, time_column)
        request = self._read(who, users, histories, at, unknown, columns)
        read = read_filters(self.store, unknown=unknown or "warn", columns=columns, **filters)
        return self._batches(request.users, k, read, filter_seen, batch_size, progress)

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
        """`recommend_batches` for users of the training data, by the name that it had in 0.1.0."""
        warnings.warn("Recommender.recommend_users is now recommend_batches", DeprecationWarning, stacklevel=2)
        return self.recommend_batches(
            users=user_ids,
            k=k,
            filter_seen=filter_seen,
            at=at,
            unknown=unknown,
            batch_size=batch_size,
            progress=progress,
        )

    def similar_items(
        self,
        items: Any,
        k: int = 10,
        *,
        include: Any = None,
        exclude: Any = None,
        output: Output | None = None,
        item_column: str | None = None,
    ) -> Any:
        """Return the k other items whose vectors are closest to that of each raw item, with their cosines.

        `items` is one item, or a list, a column or a table of them. The output is as in `recommend`; a table has the
        columns item_id, similar_item_id, rank, score, and title if the store has titles.

        Raises:
            UserError: an unknown item, a k below 1, or a run without vectors.
        """
        encoder = self._model().encoder
        columns = NamedColumns(item=item_column)
        filters = read_filters(self.store, include=include, exclude=exclude, columns=columns)
        k = self._clamped(k, filters.num_candidates)
        raw, default = self._read_items(items, columns)
        rows = self._item_rows(raw)
        if output is not None:
            check_kind(output, ("lists", "dict", "one"))
        vectors = self._vectors_of(rows)
        itself = Jagged(torch.from_numpy(rows), torch.arange(len(rows) + 1)).to(vectors.device)
        scores, found = _top_k(VectorScores(vectors, encoder), k, filters, itself)
        ids = self.store.item_ids.decode(rows)
        part = self._listed(np.arange(len(rows)), ids, scores.cpu().numpy(), found.cpu().numpy())
        output = output or default
        if output not in ("lists", "dict", "one"):
            return from_arrow(self._table([part], "item_id", "similar_item_id"), output)  # type: ignore[arg-type]
        lists = _lists([part], np.arange(len(rows)), len(rows))
        if output == "dict":
            return dict(zip(raw.to_pylist(), lists, strict=True))
        return lists[0] if output == "one" else lists

    def item_vectors(self, items: Any = None) -> Vectors:
        """Return the vectors of all items in the order of the store's rows, or those of some raw `items`.

        Raises:
            UserError: an unknown item, or a run without vectors.
        """
        self._model()
        if items is None:
            rows = np.arange(self.store.num_items)
        else:
            rows = self._item_rows(self._read_items(items, NamedColumns())[0])
        return Vectors(self.store.item_ids.decode(rows), self._vectors_of(rows).cpu().numpy())

    def user_vectors(
        self,
        who: Any = None,
        *,
        users: Any = None,
        histories: Any = None,
        at: Time | Sequence[Time] | None = None,
        unknown: Unknown | None = None,
    ) -> Vectors:
        """Return the vectors of users or histories, given as in `recommend`, as the trained model computes them.

        A user's vector times an item's is the model's score; `recommend` ranks by it where the model is delivered.
        Users without an event that the model knows have no vector and are left out, with a warning.

        Raises:
            UserError: as `recommend`, or a run without vectors.
        """
        model = self._model()
        asked = self._read(who, users, histories, at, unknown, NamedColumns()).users
        some = np.flatnonzero(asked.lengths > 0)
        if len(some) < len(asked.lengths):
            warn_caller(
                f"{len(asked.lengths) - len(some):,} of {len(asked.lengths):,} users have no item that the model knows "
                "and no vector; they are left out"
            )

        def work(chosen: slice, step: Step) -> NDArray[np.float32]:
            vectors: NDArray[np.float32] = model.encode(asked.histories(some[chosen]), step).cpu().numpy()
            return vectors

        jobs = batches_of(len(some), model.batch_size)
        parts = list(run_jobs(work, jobs, num_workers=self._workers(jobs)))
        width = model.encoder.item_rows(0, 1).shape[1]
        return Vectors(asked.ids(some), np.concatenate([np.zeros((0, width), np.float32), *parts]))

    @property
    def run(self) -> Path:
        """The run folder that it was loaded from.

        Raises:
            UserError: it was not loaded from a run.
        """
        return self.opened_run().folder.path

    @property
    def delivered(self) -> str | None:
        """What it recommends with, chosen on validation: the model, a simple method, or a sum; None if unknown."""
        return None if self._opened is None else self._opened.delivered

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics of what is delivered on the test items, as training measured them, else measured now."""
        summary = read_summary(self.run) if self.opened_run().checkpoint.which == "best" else None
        return self.evaluate().metrics if summary is None else dict(summary["metrics"])

    def evaluate(self, part: Literal["test", "valid"] = "test", *, filter_seen: bool | None = None) -> RunEvaluation:
        """Measure it on its held-out items beside the baselines, as `turbogr.evaluate` does."""
        opened = self.opened_run()
        return evaluate(
            self.run, data=self.store.path, which=opened.checkpoint.which, part=part, filter_seen=filter_seen
        )

    def save(self, path: str | Path) -> Path:
        """Copy the run folder to `path`, which `turbogr.load` opens on any machine, and return that path.

        Raises:
            UserError: something is there already.
        """
        target = Path(path)
        if target.exists():
            raise UserError(f"{target} already exists; save to another folder, or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        try:
            shutil.copytree(self.run, aside)
            sentence = RunFolder.open(aside).keep_data(self.store, "auto")
            aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        if sentence is not None:
            warn_caller(sentence)
        return target

    @functools.cached_property
    def item_info(self) -> ItemInfo | None:
        """Titles and other columns of the items, None if the store has none."""
        return ItemInfo.of(self.store)

    def titles(self, items: Sequence[Any] | NDArray[Any]) -> list[str | None]:
        """Return the titles of raw items, None where the store has no title."""
        return [None] * len(items) if self.item_info is None else self.item_info.titles_of(items)

    def __repr__(self) -> str:
        where = "" if self._opened is None else f"{str(self.run)!r}: "
        return f"Recommender({where}{self.store.num_items:,} items, {self.store.num_users:,} users)"

    def _read(
        self,
        who: Any,
        users: Any,
        histories: Any,
        at: Time | Sequence[Time] | None,
        unknown: Unknown | None,
        columns: NamedColumns,
    ) -> Request:
        given = [value is not None for value in (who, users, histories)]
        if sum(given) > 1:
            raise UserError("users, histories and the first argument ask for the same thing; give one of them")
        kind: Literal["users", "histories"] | None = (
            None if not any(given[1:]) else "users" if given[1] else "histories"
        )
        asked = who if given[0] else users if given[1] else histories
        return read_request(
            asked,
            self.store,
            kind=kind,
            at=at,
            unknown=unknown,
            columns=columns,
            typical=lambda: self._typical_times,
        )

    def _batches(
        self,
        users: RequestedUsers,
        k: int,
        filters: ItemFilters,
        filter_seen: bool | None,
        batch_size: int | None,
        progress: Callable[[int], None] | None,
    ) -> Generator[Recommendations, None, None]:
        k = self._clamped(k, filters.num_candidates)
        seen = self.filter_seen if filter_seen is None else filter_seen
        lengths = users.lengths
        self._report_empty(users, lengths)
        jobs = batches_of(len(lengths), batch_size or self.scorer.batch_size)

        def work(chosen: slice, step: Step) -> Recommendations:
            places = np.arange(chosen.start, chosen.stop)
            scores = np.empty((len(places), k), np.float32)
            rows = np.empty((len(places), k), np.int64)
            for known in (True, False):
                some = np.flatnonzero((lengths[places] > 0) == known)
                if len(some):
                    found = self._best(users, places[some], known, k, filters, seen, step)
                    scores[some], rows[some] = (part.cpu().numpy() for part in found)
            return self._listed(places, users.ids(places), scores, rows)

        return run_jobs(work, jobs, num_workers=self._workers(jobs), progress=progress)

    def _best(
        self,
        users: RequestedUsers,
        places: Int64Array,
        known: bool,
        k: int,
        filters: ItemFilters,
        filter_seen: bool,
        step: Step,
    ) -> tuple[Tensor, Tensor]:
        """The best items of some users, all with a history or (not `known`) all without one."""
        if known:
            scores = self.scorer.score(users.histories(places), step)
        else:
            scores = MatrixScores(self._popularity.expand(len(places), -1))
        left_out = [users.seen(places)] if filter_seen and known else []
        ids = users.ids(places) if filters.included or filters.excluded else np.zeros(0)
        if filters.excluded:
            left_out.append(filters.own(ids, filters.excluded)[:2])
        exclude = _joined(left_out, len(places)).to(scores.device) if left_out else None
        return _top_k(scores, k, filters, exclude, ids)

    def _listed(
        self,
        places: Int64Array,
        user_ids: NDArray[Any],
        scores: NDArray[np.float32],
        rows: Int64Array,
    ) -> Recommendations:
        kept = rows >= 0
        user, column = np.nonzero(kept)
        items = self.store.item_ids.decode(rows[kept])
        return Recommendations(user_ids[user], items, column + 1, scores[kept], len(user_ids), places[user])

    def item_columns(self, items: NDArray[Any], names: Sequence[str] = ()) -> dict[str, pa.Array]:
        """Return the titles of raw items, if there are any, and other columns about them, by the columns' names.

        Raises:
            UserError: there is no such column.
        """
        info = self.item_info
        names = (names,) if isinstance(names, str) else names
        if info is None and names:
            raise UserError(
                f"{self.store.path} has no columns about its items, such as {names[0]!r}; `turbogr item-info` adds them"
            )
        titled = info is not None and info.has_titles
        columns = {"title": pa.array(self.titles(items), pa.string())} if titled else {}
        rows = self.store.item_ids.encode(items) if names else np.zeros(0, np.int64)
        return {**columns, **{name: info.column_of(name, rows) for name in names if info is not None}}

    def _output(
        self, parts: list[Recommendations], request: Request, output: Output, item_columns: Sequence[str]
    ) -> Any:
        """Return what was found in the form that a call asked for."""
        if output not in ("lists", "dict", "one"):
            return from_arrow(self._table(parts, "user_id", "item_id", item_columns), output)  # type: ignore[arg-type]
        if item_columns:
            raise UserError("item_columns are columns of a table, and this call returns lists; ask for output='pandas'")
        if output == "dict":
            ids = request.users.ids(np.arange(len(request.places))).tolist()
            return dict(zip(ids, _lists(parts, np.arange(len(ids)), len(ids)), strict=True))
        lists = _lists(parts, request.places, request.num_asked)
        return lists[0] if output == "one" else lists

    def _table(
        self, parts: list[Recommendations], first: str, second: str, item_columns: Sequence[str] = ()
    ) -> pa.Table:
        asked, items, positions, scores = (
            np.concatenate([getattr(part, name) for part in parts]) if parts else np.zeros(0)
            for name in ("user_ids", "item_ids", "positions", "scores")
        )
        columns = {
            first: ids_array(asked, first),
            second: ids_array(items, second),
            "rank": pa.array(positions.astype(np.int32)),
            "score": pa.array(scores.astype(np.float32)),
        }
        return pa.table({**columns, **self.item_columns(items, item_columns)})

    def _clamped(self, k: Any, num_candidates: int | None) -> int:
        """Return k, or the number of candidates if that is smaller.

        Raises:
            UserError: k is not a whole number of at least 1.
        """
        check_k(k)
        most = self.store.num_items if num_candidates is None else max(1, num_candidates)
        if k > most:
            what = "items" if num_candidates is None else "candidates"
            warn_caller(f"k is {k:,}, but there are {most:,} {what}; lists have no more than that", Note)
        return min(int(k), most)

    def _report_empty(self, users: RequestedUsers, lengths: Int64Array) -> None:
        empty = np.flatnonzero(lengths == 0)
        if len(empty) and not isinstance(users, StoreUsers):
            named = isinstance(users, GivenUsers) and users.names is not None
            first = f"that of user {users.ids(empty[:1]).tolist()[0]!r}" if named else f"number {empty[0]}"
            warn_caller(
                f"{len(empty):,} of {len(lengths):,} histories have no item that the model knows (the first is "
                f"{first}); they get the most popular items"
            )

    def _model(self) -> ModelScorer:
        if self.model is None:
            raise UserError(
                "what this run delivers has no vectors of users and items, because no trained model is part of it; ask "
                "for recommendations instead, or load a run of a model"
            )
        return self.model

    def opened_run(self) -> OpenedRun:
        """Return the run that it was loaded from.

        Raises:
            UserError: it was not loaded from a run.
        """
        if self._opened is None:
            raise UserError("this recommender was not loaded from a run; use `turbogr.load(run)`")
        return self._opened

    def _read_items(self, items: Any, columns: NamedColumns) -> tuple[pa.Array, Output]:
        """Return raw items as an array, and the output that asking for them gets by default."""
        if is_table(items):
            return column_of("item", items, self.store, columns, "the table of items"), kind_of(items) or "arrow"
        if isinstance(items, str | bytes) or not isinstance(items, Iterable):
            return ids_array([items], "items"), "one"
        kind = kind_of(items)
        return ids_array(items if kind or isinstance(items, np.ndarray) else list(items), "items"), kind or "lists"

    def _item_rows(self, raw: pa.Array) -> Int64Array:
        rows = self.store.item_ids.encode(raw)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            first = ", ".join(repr(raw[int(place)].as_py()) for place in missing[:3])
            what = f"the item {first}" if len(missing) == 1 else f"{len(missing):,} of the items, such as {first}"
            raise UserError(f"the model does not know {what}; it has {self.store.num_items:,} others")
        return rows

    def _vectors_of(self, rows: Int64Array) -> Tensor:
        """Return the vectors of item rows, [n, d]; the table is read in pieces."""
        encoder = self._model().encoder
        vectors = [encoder.item_rows(0, 0)]
        for first in range(0, self.store.num_items, _ITEM_PIECE):
            last = min(first + _ITEM_PIECE, self.store.num_items)
            inside = rows[(rows >= first) & (rows < last)]
            if len(inside):
                vectors.append(encoder.item_rows(first, last)[torch.from_numpy(inside - first)])
        order = np.argsort(rows // _ITEM_PIECE, kind="stable")  # the pieces follow each other
        found = torch.cat(vectors)
        placed = torch.empty_like(found)
        placed[torch.from_numpy(order)] = found
        return placed

    @functools.cached_property
    def _typical_times(self) -> TypicalTimes:
        return TypicalTimes.of(self.store)

    @functools.cached_property
    def _popularity(self) -> Tensor:
        """Share of every item in the training events, [V]."""
        counts = self.store.item_counts(self.split.train_end)
        return torch.from_numpy((counts / max(1, counts.sum())).astype(np.float32))

    def _workers(self, jobs: Sequence[slice]) -> int:
        return max(1, min(self.scorer.num_workers, len(jobs)))


def _top_k(
    scores: Scores, k: int, filters: ItemFilters, exclude: Jagged | None, ids: NDArray[Any] | None = None
) -> tuple[Tensor, Tensor]:
    """`top_k` of the candidates that the filters leave to queries; `ids` are those of the queries' users."""
    if filters.included and ids is not None:
        rows, lengths, has = filters.own(ids, filters.included)
        own = Jagged.from_lengths(torch.from_numpy(rows), torch.from_numpy(lengths))
        scores = CandidateScores(scores, filters.allowed, own, torch.from_numpy(has))
    elif filters.allowed is not None:
        scores = CandidateScores(scores, filters.allowed)
    return top_k(scores, k, exclude)


def _joined(lists: Sequence[tuple[Int64Array, Int64Array]], num: int) -> Jagged:
    """Join several sets of `num` lists, each given as values one behind the other and lengths, list by list."""
    values = np.concatenate([part for part, _ in lists])
    owner = np.concatenate([np.repeat(np.arange(num), lengths) for _, lengths in lists])
    lengths = np.bincount(owner, minlength=num).astype(np.int64)
    order = np.argsort(owner, kind="stable")
    return Jagged.from_lengths(torch.from_numpy(values[order]), torch.from_numpy(lengths))


def _lists(parts: Sequence[Recommendations], places: Int64Array, num: int) -> list[Ranked]:
    """Return the list of each of `num` users; the user at place p of the parts is number places[p]."""
    lists: list[Ranked] = [[] for _ in range(num)]
    for part in parts:
        entries = zip(places[part.places].tolist(), part.item_ids.tolist(), part.scores.tolist(), strict=True)
        for place, item, score in entries:
            lists[place].append((item, score))
    return lists


def check_k(k: Any) -> None:
    """Raise UserError unless k is a whole number of at least 1."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise UserError(f"k is {k!r}; give a whole number of items, at least 1")
