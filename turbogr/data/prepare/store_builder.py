"""The stages from an opened input to a store, in memory that does not grow with the number of events.

1. Scan: every record is checked once; keys of users and items, times and actions go to temporary columns on disk.
2. Ids become rows, ascending by raw id (known ids of an extended store keep their row).
3. Records are grouped by ranges of users and sorted by (user, time, order of the input or chance), range by range.
4. Filters (repeated events, k-core) work on the sorted columns.
5. What is left is written to the store, and tables of features are joined to its items and users; the store is then
   renamed into place.

Threads compute blocks at the same time, but results are used in the order of the input, so the store is the same byte
for byte whatever their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.feature_columns import FeatureColumn, FeatureInfo
from turbogr.data.prepare import data_warnings
from turbogr.data.prepare.feature_kinds import NumberSummary
from turbogr.data.prepare.feature_table import FeatureTable, JoinedFeatures, carried, join
from turbogr.data.prepare.filters import Filters, core
from turbogr.data.prepare.id_keys import KeyedIds
from turbogr.data.prepare.id_rows import IdRows
from turbogr.data.prepare.ordered_map import ordered_map
from turbogr.data.prepare.progress_bar import Progress
from turbogr.data.prepare.scan import ACTION, EVENT, Scan, scan
from turbogr.data.prepare.sorting import Partitions, SortedLog, positions_of, tie_keys_of, tied, user_ranges
from turbogr.data.prepare.source import Reader, ReadOptions, Source
from turbogr.data.prepare.spilling import Spill
from turbogr.data.prepare.vector_table import VectorTable, join_vectors
from turbogr.data.ranges import offsets_of
from turbogr.data.store import Manifest, Store
from turbogr.data.store_writer import StoreWriter
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError

_CHUNK_RECORDS = 1 << 20

Columns = dict[str, NDArray[Any]]


@dataclass
class StoreBuilder:
    """One run of `prepare`.

    Attributes:
        writer: of the store.
        cleanup: called at the end, whatever happens; temporary columns are registered there.
        reader: the opened input.
        split, ties: rule of the split and order of ties, as the manifest records them.
        known: the store to be extended, None if there is none.
        tables, vectors: opened tables of features of items and users, and of vectors of items.
        warnings: sentences for the user, complete after `build`.
        infos: what the manifest says of features, complete after `build`.
    """

    writer: StoreWriter
    cleanup: contextlib.ExitStack
    source: Source
    reader: Reader
    options: ReadOptions
    filters: Filters
    split: str
    ties: str
    known: Store | None
    threads: int
    progress: Progress
    tables: tuple[FeatureTable, ...] = ()
    vectors: VectorTable | None = None
    warnings: list[str] = field(default_factory=list)
    infos: dict[str, FeatureInfo] = field(default_factory=dict)

    def build(self) -> Store:
        """Run all stages.

        Raises:
            UserError: a record is wrong, or too little is left to learn from.
        """
        log = self._scan()
        users = IdRows.of(log.users, "user", None if self.known is None else self.known.user_ids)
        items = IdRows.of(log.items, "item", None if self.known is None else self.known.item_ids)
        categories = self._categories(log)
        sorted_log = self._sort(self._group(log, users, items, categories), log, users)
        keep_user, keep_item = self._core(sorted_log, log)
        users, items = users.kept(keep_user), items.kept(keep_item)
        _refuse_too_small(log, len(users), len(items))
        num_early, num_tied = self._write(sorted_log, log, users, items, categories)
        users.write(self.writer, "user_ids")
        items.write(self.writer, "item_ids")
        joined = self._join(users, items)
        store = self.writer.commit(self._manifest(log, users, items, num_tied, joined))
        self._collect_warnings(store, log, num_early)
        return store

    def _scan(self) -> Scan:
        known = self.known
        kinds = {} if known is None else {"user": known.user_ids.kind, "item": known.item_ids.kind}
        log = scan(self.reader, self.options, kinds, self.writer.scratch, self.threads, self.progress)
        self.cleanup.callback(log.spill.remove)
        _refuse_empty(log)
        return log

    def _categories(self, log: Scan) -> dict[str, IdRows]:
        """Give every category of the features of events its value, those of the extended store the one they have."""
        found = {}
        for name, distinct in log.features.items():
            if distinct is None:
                continue
            before = None if self.known is None else self.known.features.get(EVENT + name)
            vocabulary = None if before is None else before.vocabulary
            rows = IdRows.of(distinct, f"feature {name!r}", vocabulary)
            found[name] = rows.kept(pc.not_equal(rows.ids, "").to_numpy(zero_copy_only=False))
        return found

    def _group(self, log: Scan, users: IdRows, items: IdRows, categories: Mapping[str, IdRows]) -> Partitions:
        """Replace ids by numbers and scatter the records to ranges of users; the columns of the scan are removed."""
        user_index, item_index = users.index(log.users), items.index(log.items)
        actions = [column for column in log.spill.columns if column.startswith((ACTION, EVENT))]
        indices = {EVENT + name: rows.index(_distinct(log, name)) for name, rows in categories.items()}
        columns: dict[str, Any] = {
            "user": user_index.dtype,
            "item": item_index.dtype,
            "time": np.int64,
            **dict.fromkeys(actions, np.float64),
            **{column: index.dtype for column, index in indices.items()},
        }
        assert log.users.counts is not None
        partitions = Partitions(self.writer.scratch, columns, user_ranges(users.by_number(log.users.counts)))
        self.cleanup.callback(partitions.remove)

        def encode(start: int) -> tuple[Columns, Int64Array]:
            stop = min(start + _CHUNK_RECORDS, log.spill.length)
            read = {name: log.spill.read(name, start, stop) for name in log.spill.columns}
            read["user"], read["item"] = user_index.numbers_of(read["user"]), item_index.numbers_of(read["item"])
            read |= {column: index.numbers_of(read[column]) for column, index in indices.items()}
            return partitions.scatter(read)

        with self.progress.stage("grouping", log.spill.length, "records") as bar:
            for scattered in ordered_map(encode, range(0, log.spill.length, _CHUNK_RECORDS), self.threads):
                partitions.append(scattered)
                bar.update(len(scattered[0]["user"]))
        log.spill.remove()
        return partitions

    def _sort(self, partitions: Partitions, log: Scan, users: IdRows) -> SortedLog:
        """Sort every range of users and drop repeated events; the partitions are removed."""
        columns = {name: dtype for name, dtype in partitions.dtypes.items() if name != "user"}
        spill = Spill(self.writer.scratch, "sorted", columns)
        self.cleanup.callback(spill.remove)
        counts = np.zeros(len(log.users.distinct), np.int64)
        tie_keys = tie_keys_of(users.ids) if self.ties == "random" else None

        def sort(part: int) -> tuple[Columns, int]:
            columns = partitions.sorted(part, tie_keys)
            again = self.filters.repeated(columns)
            if again is None:
                return columns, 0
            return {name: values[~again] for name, values in columns.items()}, int(again.sum())

        with self.progress.stage("sorting", partitions.length, "records") as bar:
            for part, num_dropped in ordered_map(sort, partitions, self.threads):
                if num_dropped:
                    log.dropped[self.filters.duplicate_reason] += num_dropped
                _count(part["user"], counts)
                spill.append(part)
                bar.update(len(part["user"]) + num_dropped)
        partitions.remove()
        return SortedLog(spill, offsets_of(counts))

    def _core(self, log: SortedLog, scanned: Scan) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which users and which items, by number, have enough events."""
        num_items = len(scanned.items.distinct)
        filters = self.filters
        if not filters.has_core:
            return np.ones(log.num_users, bool), np.ones(num_items, bool)

        def blocks() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
            with self.progress.stage("filtering", log.spill.length, "records") as bar:
                for users, items in ordered_map(log.users_and_items, log.user_blocks(), self.threads):
                    yield users, items
                    bar.update(len(items))

        keep_user, keep_item, left = core(
            blocks, log.num_users, num_items, filters.min_user_events, filters.min_item_events
        )
        num_dropped = log.spill.length - int(left.sum())
        if num_dropped:
            scanned.dropped[filters.core_reason] += num_dropped
        return keep_user, keep_item

    def _write(
        self, log: SortedLog, scanned: Scan, users: IdRows, items: IdRows, categories: Mapping[str, IdRows]
    ) -> tuple[int, int]:
        """Write the event columns and the offsets of the kept users and items, and sum up features and actions.

        Return how many times lie before 1990, and how many events have the time of the user's event before them.
        """
        rows_of = {EVENT + name: rows.final_rows for name, rows in categories.items()}
        events = _StoreColumns(log, scanned, users.final_rows, items.final_rows, rows_of)
        summaries = {ACTION + name: NumberSummary() for name in self.reader.columns.predicted}
        summaries |= {EVENT + name: NumberSummary() for name in scanned.features if name not in categories}
        missing = dict.fromkeys(rows_of, 0)
        counts = np.zeros(len(users), np.int64)
        num_early = num_tied = 0
        with self.progress.stage("writing", log.spill.length, "records") as bar:
            for block in ordered_map(events.read, log.user_blocks(), self.threads):
                _count(block.users, counts)
                for name, values in block.columns.items():
                    self.writer.append(name, values)
                num_early += int((block.columns["times"] < data_warnings.FIRST_USUAL_TIME).sum())
                num_tied += block.num_tied
                for key, summary in summaries.items():
                    summary.add(block.columns[key])
                for key in missing:
                    missing[key] += int((block.columns[key] < 0).sum())
                bar.update(block.num_records)
        log.spill.remove()
        self.writer.append("offsets", offsets_of(counts))
        for name, rows in categories.items():
            rows.write(self.writer, f"{EVENT}{name}.values")
            self.infos[EVENT + name] = FeatureInfo("category", len(rows), missing[EVENT + name])
        for key, summary in summaries.items():
            self.infos[key] = self._number_info(key, summary)
        return num_early, num_tied

    def _number_info(self, key: str, summary: NumberSummary) -> FeatureInfo:
        """Return the entry of a column of numbers; a feature of an extended store keeps the scale that it has there."""
        info = summary.info(action=key.startswith(ACTION))
        before = None if self.known is None else self.known.features.get(key)
        if before is None or key.startswith(ACTION):
            return info
        return dataclasses.replace(info, mean=before.info.mean, std=before.info.std, log=before.info.log)

    def _join(self, users: IdRows, items: IdRows) -> dict[str, Any]:
        """Write the features of items and users, and return what became of the records of their tables."""
        settings: dict[str, Any] = {}
        ids = {"item": items.vocabulary_of_rows(), "user": users.vocabulary_of_rows()}
        for table in self.tables:
            joined = join(table, ids[table.owner], self.known)
            settings[f"{table.owner}_features"] = joined.record(table)
            self._write_features(joined)
        if self.vectors is not None:
            joined = join_vectors(self.vectors, ids["item"], self.known, self.writer.scratch)
            settings["item_vectors"] = joined.record(self.vectors)
            self._write_features(joined)
        for key, column in {} if self.known is None else self.known.features.items():
            if column.owner in ids and key not in self.infos:
                self._write_feature(carried(column, len(ids[column.owner])))
        return settings

    def _write_features(self, joined: JoinedFeatures) -> None:
        self.warnings += joined.warnings
        for column in joined.columns:
            self._write_feature(column)

    def _write_feature(self, column: FeatureColumn) -> None:
        if column.key in self.infos:
            raise UserError(f"two tables have the feature '{column.key}'; rename a column of one of them")
        self.writer.write_feature(column)
        self.infos[column.key] = column.info

    def _manifest(self, log: Scan, users: IdRows, items: IdRows, num_tied: int, joined: Mapping[str, Any]) -> Manifest:
        columns, form = self.reader.columns, log.time_form
        return Manifest(
            source=self.source.name,
            num_users=len(users),
            num_items=len(items),
            num_events=log.num_kept,
            split=self.split,
            times="positions" if form is None else "real",
            account={
                "rows_in": log.records_in,
                "rows_kept": log.num_kept,
                "dropped": dict(sorted(log.dropped.items())),
            },
            filters={
                "min_user_events": self.filters.min_user_events,
                "min_item_events": self.filters.min_item_events,
                "duplicates": self.filters.duplicates,
                "rows": [rule.reason for rule in columns.filters],
            },
            settings={
                "columns": {"user": columns.user, "item": columns.item, "time": columns.time},
                "time": None if form is None else {"written": form.kind, "unit": form.unit},
                "ties": None if form is None else {"order": self.ties, "events": num_tied},
                "where": list(self.options.where),
                "options": _own_settings(self.options.own),
                **({"actions": list(self.options.actions)} if self.options.actions else {}),
                **joined,
                **({} if self.source.plugin is None else {"plugin": self.source.plugin}),
            },
            extends=None if self.known is None else self.known.manifest.content_hash,
            known_users=users.num_known,
            known_items=items.num_known,
            features=dict(sorted(self.infos.items())),
        )

    def _collect_warnings(self, store: Store, log: Scan, num_early: int) -> None:
        ids = {"user": store.user_ids.ids, "item": store.item_ids.ids}
        for role, raw in ids.items():
            self.warnings += data_warnings.similar_ids(role, raw) + data_warnings.ids_with_line_ends(role, raw)
        self.warnings += data_warnings.doubtful_ids("user", ids["user"], lambda: store.lengths)
        self.warnings += data_warnings.doubtful_ids("item", ids["item"], store.item_counts)
        is_named = self.options.time_unit != "auto" or self.options.time_format is not None
        if log.time_form is not None and num_early > store.num_events / 2:
            self.warnings += [] if is_named else [data_warnings.early_times(store, log.time_form)]
        elif log.time_form is not None:
            self.warnings += data_warnings.corrupt_times(
                log.odd_times, log.records_in, self.reader.columns.time or "", log.time_form
            )
        self.warnings += data_warnings.useless_split(store)


@dataclass(frozen=True)
class _StoreBlock:
    """The events of a range of users as the store keeps them: their user's row and the store's columns."""

    users: NDArray[np.integer[Any]]
    columns: Columns
    num_tied: int
    num_records: int


@dataclass(frozen=True)
class _StoreColumns:
    """Makes the store's columns from the sorted log; `user_rows` and `item_rows` map numbers to rows, -1 if dropped.

    `rows_of` does so for the categories of every feature, by its column.
    """

    log: SortedLog
    scanned: Scan
    user_rows: NDArray[np.int32]
    item_rows: NDArray[np.int32]
    rows_of: Mapping[str, NDArray[np.int32]]

    def read(self, block: tuple[int, int]) -> _StoreBlock:
        """Read the users block[0]:block[1]. Thread-safe."""
        users, items = self.log.users_and_items(block)
        users, items = self.user_rows[users], self.item_rows[items]
        keep = (users >= 0) & (items >= 0)
        users = users[keep]
        start, stop = int(self.log.offsets[block[0]]), int(self.log.offsets[block[1]])
        columns: Columns = {"items": items[keep]}
        num_tied = 0
        if self.scanned.time_form is None:
            columns["times"] = positions_of(users)
        else:
            ticks = self.log.spill.read("time", start, stop)[keep]
            num_tied = int(tied(users, ticks).sum())
            columns["times"] = ticks // self.scanned.time_form.ticks_per_second
        for name, values in self.scanned.actions.items():
            columns[ACTION + name] = self.log.spill.read(ACTION + name, start, stop)[keep].astype(values.dtype)
        for name in self.scanned.features:
            found = self.log.spill.read(EVENT + name, start, stop)[keep]
            rows = self.rows_of.get(EVENT + name)
            columns[EVENT + name] = found.astype(np.float32) if rows is None else rows[found]
        return _StoreBlock(users, columns, num_tied, stop - start)


def _distinct(log: Scan, name: str) -> KeyedIds:
    distinct = log.features[name]
    assert distinct is not None, "a feature of categories"
    return distinct


def _count(users: NDArray[np.integer[Any]], counts: Int64Array) -> None:
    """Add to `counts` [U] how many events every user of a sorted block has."""
    if len(users):
        some = np.bincount(users - users[0])
        counts[users[0] : users[0] + len(some)] += some


def _own_settings(options: Any) -> dict[str, Any]:
    """Return the options that only the source has, as the manifest records them; unset ones are left out."""
    values = {} if options is None else dataclasses.asdict(options)
    return {name: value for name, value in values.items() if value is not None}


def _refuse_empty(log: Scan) -> None:
    if log.num_kept == 0:
        raise UserError(f"no records are left to prepare: {log.account}")


def _refuse_too_small(log: Scan, num_users: int, num_items: int) -> None:
    """Raise UserError where nothing could be learned."""
    _refuse_empty(log)
    for count, what, need in ((num_users, "user", "users"), (num_items, "item", "items")):
        if count < 2:
            left = f"a single {what}" if count else f"no {what}"
            raise UserError(f"the log has {left} ({log.account}); a recommender needs several {need}")
