"""Interaction log -> store, in memory that does not grow with the number of events.

1. `scan`: every row is checked once; keys of users and items, times and actions go to temporary columns on disk.
2. Ids become rows, ascending by raw id (known ids of an extended store keep their row).
3. Rows are scattered to ranges of users and sorted by (user, time, original row or chance), range by range.
4. Filters (repeated events, k-core) work on the sorted columns.
5. What is left is written to the store, which is renamed into place at the end.

Threads compute blocks side by side, but results are used in the order of the input, so the store is the same byte for
byte whatever their number.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.filters import core, repeated
from turbogr.data.id_rows import IdRows
from turbogr.data.ordered import default_threads, ordered_map
from turbogr.data.progress import Progress
from turbogr.data.rows import doubtful_ids
from turbogr.data.scan import ACTION, Scan, scan
from turbogr.data.sorting import Partitions, SortedLog, places, tie_keys_of, tied, user_ranges
from turbogr.data.sources import check_options, find_source
from turbogr.data.sources.block import Reader, ReadOptions, Source
from turbogr.data.sources.table import table_source
from turbogr.data.spill import Spill
from turbogr.data.split import Split, future_leak, iso_time, parse_rule, time_range
from turbogr.data.store import Manifest, Store, StoreWriter
from turbogr.data.times import UNITS, TimeForm
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import Note, UserError

DUPLICATES = ("keep", "exact", "item")
TIES = ("file", "random")
_CHUNK_ROWS = 1 << 20
_LONGEST_NAME = 200  # in bytes; common file systems end at 255
_LEAK_WORTH_TELLING = 0.01
_TIES_WORTH_TELLING = 0.05
_FIRST_USUAL_TIME = 631_152_000  # 1990


class DataWarning(UserWarning):
    """Something odd in the data that works but deserves a look."""


def prepare(
    source: str | Source,
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    keep_columns: str | Sequence[str] = (),
    time_unit: str = "auto",
    time_format: str | None = None,
    delimiter: str | None = None,
    column_names: str | Sequence[str] = (),
    quote: str | None = None,
    text_ids: bool = False,
    drop_bad_rows: bool = False,
    split: str | None = None,
    min_user_events: int | None = None,
    min_item_events: int | None = None,
    duplicates: str | None = None,
    ties: str | None = None,
    where: str | Sequence[str] = (),
    extend: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = False,
    **extra: Any,
) -> Store:
    """Turn the log at `paths`, read as `source`, into a store at `out` and return it.

    Options left at None take the source's published defaults; one that means nothing to the source is refused.
    `keep_columns` are number columns to keep; `duplicates` drops repeated rows: "keep" none, "exact" those
    of the same user, item and time, "item" every later event of a user with the same item; `ties` is the order of a
    user's events at the same time, that of the "file" or a fixed "random" one (if None: as in the extended store, else
    that of the file); `where` are conditions on rows, such as "rating >= 4". `extend` names a store whose
    users and items keep their rows; new ones are appended. `extra` are options of the source alone.

    Raises:
        UserError: anything that the user can mend; nothing is left behind then.
    """
    kind = find_source(source) if isinstance(source, str) else source
    reading: dict[str, Any] = {
        "user_column": _name(user_column),
        "item_column": _name(item_column),
        "time_column": _name(time_column),
        "keep_columns": _several(keep_columns),
        "time_unit": time_unit,
        "time_format": time_format,
        "delimiter": delimiter,
        "column_names": _several(column_names),
        "quote": quote,
        "text_ids": text_ids,
        "drop_bad_rows": drop_bad_rows,
        "where": _several(where),
    }
    options = ReadOptions(**reading, extra={**kind.extra, **extra})
    check_options(kind, [name for name in reading if getattr(options, name) != getattr(ReadOptions(), name)])
    check_options(kind, [name for name, value in extra.items() if value is not None])
    _check_file_names(options.keep_columns)
    filters = Filters.choose(kind, min_user_events, min_item_events, duplicates)
    rule = parse_rule(kind.split if split is None else split)
    if ties not in (None, *TIES):
        raise UserError(f"--ties must be one of {', '.join(TIES)}, got {ties!r}")
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    threads = default_threads() if threads is None else threads
    _check_count("--threads", threads)
    if time_unit not in UNITS:
        raise UserError(f"--time-unit must be one of {', '.join(UNITS)}, got {time_unit!r}")
    known = None if extend is None else Store.open(extend)
    order, _ = (known and known.manifest.ties) or ("file", 0)
    reader = kind.open([Path(path) for path in paths], options)
    if reader.columns.time is None:
        _refuse_options_of_times(rule, duplicates, ties, options)
    if known is not None and text_ids:
        _refuse_text_ids(known)
    with StoreWriter(out, overwrite=overwrite) as writer, contextlib.ExitStack() as cleanup:
        work = Preparation(
            writer, cleanup, reader, options, filters, rule, ties or order, known, threads, Progress(progress)
        )
        store = work.run(kind.name)
    for sentence in work.warnings:
        warnings.warn(sentence, DataWarning, stacklevel=2)
    decided = _order_of_the_file(store)
    if decided is not None:
        warnings.warn(decided, Note, stacklevel=2)
    leak = _training_on_the_future(store)
    if leak is not None:  # no surprise where the source's usual split does it
        warnings.warn(leak, Note if split is None else DataWarning, stacklevel=2)
    return store


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(map(str, names))


def _name(column: object) -> str | None:
    """Return the name of a column as text; pandas also takes numbers for names."""
    return None if column is None else str(column)


def _check_count(option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{option} must be an integer of at least 1, got {value!r}")


def _refuse_options_of_times(rule: str, duplicates: str | None, ties: str | None, options: ReadOptions) -> None:
    """Raise UserError for an option that needs times, for a log that has only an order."""
    if rule.startswith("time:"):
        raise UserError(f"split {rule!r} needs times, but the log has only an order; use leave-one-out")
    if duplicates == "exact":
        raise UserError("--duplicates exact compares times, but the log has only an order; use item or keep")
    if ties is not None:
        raise UserError(f"--ties {ties} is about events at the same time, but the log has only an order; leave it out")
    for name, given in (("unit", options.time_unit != "auto"), ("format", options.time_format is not None)):
        if given:
            raise UserError(f"--time-{name} says how times are written, but the log has none; leave it out")


def _refuse_text_ids(known: Store) -> None:
    for role, ids in (("user", known.user_ids), ("item", known.item_ids)):
        if not ids.is_text:
            raise UserError(
                f"--text-ids does not go with --extend {known.path}, whose {role} ids are integers; leave one out"
            )


def _check_file_names(columns: Sequence[str]) -> None:
    """Refuse columns whose name cannot be part of the name of a file of the store."""
    for name in columns:
        if "/" in name or "\0" in name or len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
            raise UserError(
                f"--keep-columns: {name[:80]!r} cannot be the name of a file of the store (it has a slash or a zero "
                f"byte, or more than {_LONGEST_NAME} bytes); rename the column in the log"
            )


def prepare_table(table: Any, out: str | os.PathLike[str], **options: Any) -> Store:
    """Turn a pandas, polars or pyarrow table in memory into a store; the options are those of `prepare`."""
    return prepare(table_source(table), [], out, **options)


@dataclass(frozen=True)
class Filters:
    """What is filtered out of the sorted log."""

    min_user_events: int
    min_item_events: int
    duplicates: str

    @classmethod
    def choose(cls, source: Source, users: int | None, items: int | None, duplicates: str | None) -> Filters:
        """Take the source's defaults where nothing is asked for; raises UserError for impossible values."""
        chosen = cls(
            source.min_user_events if users is None else users,
            source.min_item_events if items is None else items,
            source.duplicates if duplicates is None else duplicates,
        )
        _check_count("--min-user-events", chosen.min_user_events)
        _check_count("--min-item-events", chosen.min_item_events)
        if chosen.duplicates not in DUPLICATES:
            raise UserError(f"--duplicates must be one of {', '.join(DUPLICATES)}, got {chosen.duplicates!r}")
        return chosen

    @property
    def core_reason(self) -> str:
        users, items = self.min_user_events, self.min_item_events
        if users > 1 and items > 1:
            return f"user with fewer than {users} or item with fewer than {items} events"
        return f"user with fewer than {users} events" if users > 1 else f"item with fewer than {items} events"


@dataclass
class Preparation:
    """One run of `prepare`."""

    writer: StoreWriter
    cleanup: contextlib.ExitStack
    reader: Reader
    options: ReadOptions
    filters: Filters
    rule: str
    ties: str
    known: Store | None
    threads: int
    progress: Progress
    warnings: list[str] = field(default_factory=list)

    def run(self, source: str) -> Store:
        known = self.known
        kinds = {} if known is None else {"user": known.user_ids.kind, "item": known.item_ids.kind}
        log = scan(self.reader, self.options, kinds, self.writer.scratch, self.threads, self.progress)
        self.cleanup.callback(log.spill.remove)
        if log.spill.length == 0:
            raise UserError(f"no rows are left to prepare: {_account_text(log.rows_in, log.dropped)}")
        users = IdRows.of(log.users, "user", None if known is None else known.user_ids)
        items = IdRows.of(log.items, "item", None if known is None else known.item_ids)
        sorted_log = self._sort(log, users, items)
        keep_user, keep_item = self._core(sorted_log, log)
        users, items = users.kept(keep_user), items.kept(keep_item)
        num_events = log.rows_in - sum(log.dropped.values())
        if num_events == 0:
            raise UserError(f"no rows are left to prepare: {_account_text(log.rows_in, log.dropped)}")
        _refuse_too_small(len(users), len(items), log)
        early, num_tied = self._write(sorted_log, log, users, items)
        users.write(self.writer, "user_ids")
        items.write(self.writer, "item_ids")
        for role, ids in (("user", users), ("item", items)):
            self.warnings += [*_look_alikes(role, ids.ids), *_line_ends(role, ids.ids)]
        form = log.time_form
        store = self.writer.commit(
            Manifest(
                source=source,
                num_users=len(users),
                num_items=len(items),
                num_events=num_events,
                split=self.rule,
                times="positions" if form is None else "real",
                account={"rows_in": log.rows_in, "rows_kept": num_events, "dropped": dict(sorted(log.dropped.items()))},
                filters={
                    "min_user_events": self.filters.min_user_events,
                    "min_item_events": self.filters.min_item_events,
                    "duplicates": self.filters.duplicates,
                    "rows": [rule.reason for rule in self.reader.columns.filters],
                },
                settings={
                    "columns": {
                        "user": self.reader.columns.user,
                        "item": self.reader.columns.item,
                        "time": self.reader.columns.time,
                    },
                    "time": None if form is None else {"written": form.kind, "unit": form.unit},
                    "ties": None if form is None else {"order": self.ties, "events": num_tied},
                    "where": list(self.options.where),
                    "options": {name: value for name, value in self.options.extra.items() if value is not None},
                },
                extends=None if known is None else known.manifest.content_hash,
                known_users=users.num_known,
                known_items=items.num_known,
            )
        )
        self.warnings += doubtful_ids("user", store.user_ids.ids, lambda: store.lengths)
        self.warnings += doubtful_ids("item", store.item_ids.ids, store.item_counts)
        said = self.options.time_unit != "auto" or self.options.time_format is not None
        if form is not None and early > num_events / 2 and not said:
            self.warnings.append(_early_times(store, form))
        self.warnings += _doubts_about_split(store)
        return store

    def _sort(self, log: Scan, users: IdRows, items: IdRows) -> SortedLog:
        """Encode, scatter and sort; the unsorted columns are removed on the way."""
        user_index, item_index = users.index(log.users), items.index(log.items)
        actions = [column for column in log.spill.columns if column.startswith(ACTION)]
        columns: dict[str, Any] = {
            "user": user_index.dtype,
            "item": item_index.dtype,
            "time": np.int64,
            **dict.fromkeys(actions, np.float64),
        }
        assert log.users.counts is not None
        counts = log.users.counts
        if users.ranks is not None:
            counts = np.empty_like(counts)
            counts[users.ranks] = log.users.counts
        partitions = Partitions(self.writer.scratch, columns, user_ranges(counts))
        self.cleanup.callback(partitions.remove)

        def encode(start: int) -> tuple[dict[str, NDArray[Any]], Int64Array]:
            stop = min(start + _CHUNK_ROWS, log.spill.length)
            read = {name: log.spill.read(name, start, stop) for name in log.spill.columns}
            read["user"], read["item"] = user_index.rows_of(read["user"]), item_index.rows_of(read["item"])
            return partitions.scatter(read)

        with self.progress.stage("grouping", log.spill.length, "rows") as bar:
            for scattered in ordered_map(encode, range(0, log.spill.length, _CHUNK_ROWS), self.threads):
                partitions.append(scattered)
                bar.update(len(scattered[0]["user"]))
        total = log.spill.length
        log.spill.remove()
        del columns["user"]
        result = SortedLog(Spill(self.writer.scratch, "sorted", columns), np.zeros(len(counts) + 1, np.int64))
        self.cleanup.callback(result.spill.remove)
        counts = np.zeros(len(counts), np.int64)
        reason = {"exact": "repeated user, item and time", "item": "repeated user and item"}
        with self.progress.stage("sorting", total, "rows") as bar:
            for part, number in ordered_map(self._sorted_part(partitions, users), partitions, self.threads):
                if number:
                    log.dropped[reason[self.filters.duplicates]] += number
                first = int(part["user"][0])
                some = np.bincount(part["user"] - first)
                counts[first : first + len(some)] += some
                result.spill.append(part)
                bar.update(len(part["user"]) + number)
        partitions.remove()
        np.cumsum(counts, out=result.offsets[1:])
        return result

    def _sorted_part(self, partitions: Partitions, users: IdRows) -> Any:
        tie_keys = tie_keys_of(users.ids) if self.ties == "random" else None

        def work(part: int) -> tuple[dict[str, NDArray[Any]], int]:
            columns = partitions.sorted(part, tie_keys)
            if self.filters.duplicates == "keep":
                return columns, 0
            times = columns["time"] if self.filters.duplicates == "exact" else None
            again = repeated(columns["user"], columns["item"], times)
            return {name: values[~again] for name, values in columns.items()}, int(again.sum())

        return work

    def _core(self, log: SortedLog, scanned: Scan) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        num_items = len(scanned.items.distinct)
        filters = self.filters
        if filters.min_user_events <= 1 and filters.min_item_events <= 1:
            return np.ones(log.num_users, bool), np.ones(num_items, bool)

        def blocks() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
            with self.progress.stage("filtering", log.spill.length, "rows") as bar:
                for users, items in ordered_map(log.users_and_items, log.user_blocks(), self.threads):
                    yield users, items
                    bar.update(len(items))

        keep_user, keep_item, left = core(
            blocks, log.num_users, num_items, filters.min_user_events, filters.min_item_events
        )
        gone = log.spill.length - int(left.sum())
        if gone:
            scanned.dropped[filters.core_reason] += gone
        return keep_user, keep_item

    def _write(self, log: SortedLog, scanned: Scan, users: IdRows, items: IdRows) -> tuple[int, int]:
        """Write the event columns and the offsets of the kept users and items.

        Return how many times are early ones, and how many events have the time of the user's event before them.
        """
        ticks_per_second = 1 if scanned.time_form is None else scanned.time_form.ticks_per_second
        positions = scanned.time_form is None
        user_rows, item_rows = users.final, items.final
        assert user_rows is not None, "ids are filtered before they are written"
        assert item_rows is not None, "ids are filtered before they are written"
        dtypes = {ACTION + name: values.dtype for name, values in scanned.actions.items()}
        counts = np.zeros(len(users), np.int64)
        early = num_tied = 0

        def work(block: tuple[int, int]) -> tuple[Int64Array, dict[str, NDArray[Any]], int, int]:
            owners, rows = log.users_and_items(block)
            owners, rows = user_rows[owners], item_rows[rows]
            keep = (owners >= 0) & (rows >= 0)
            owners = owners[keep]
            start, stop = int(log.offsets[block[0]]), int(log.offsets[block[1]])
            written: dict[str, NDArray[Any]] = {"items": rows[keep]}
            some_tied = 0
            if positions:
                written["times"] = places(owners)
            else:
                ticks = log.spill.read("time", start, stop)[keep]
                some_tied = int(tied(owners, ticks).sum())
                written["times"] = ticks // ticks_per_second
            for name, dtype in dtypes.items():
                written[name] = log.spill.read(name, start, stop)[keep].astype(dtype)
            return owners, written, some_tied, stop - start

        with self.progress.stage("writing", log.spill.length, "rows") as bar:
            for owners, written, some_tied, rows in ordered_map(work, log.user_blocks(), self.threads):
                if len(owners):
                    some = np.bincount(owners - owners[0])
                    counts[owners[0] : owners[0] + len(some)] += some
                for name, values in written.items():
                    self.writer.append(name, values)
                early += int((written["times"] < _FIRST_USUAL_TIME).sum())
                num_tied += some_tied
                bar.update(rows)
        log.spill.remove()
        self.writer.append("offsets", np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))
        return early, num_tied


def _account_text(rows_in: int, dropped: Any) -> str:
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(dropped.items()))
    return f"{rows_in:,} rows in, dropped {reasons or 'none'}"


def _refuse_too_small(num_users: int, num_items: int, log: Scan) -> None:
    """Raise UserError where nothing could be learned."""
    for count, what, need in ((num_users, "user", "users"), (num_items, "item", "items")):
        if count < 2:
            left = f"a single {what}" if count else f"no {what}"
            raise UserError(
                f"the log has {left} ({_account_text(log.rows_in, log.dropped)}); a recommender needs several {need}"
            )


def _look_alikes(role: str, ids: Any) -> list[str]:
    """Warn where ids differ only in case or in spaces at their ends; they stay different."""
    if isinstance(ids, np.ndarray):
        return []
    plain = pc.utf8_lower(pc.utf8_trim_whitespace(ids))
    again = len(plain) - pc.count_distinct(plain).as_py()
    if not again:
        return []
    subject, kept = ("id differs", "it is") if again == 1 else ("ids differ", "they are")
    return [f"{again:,} {role} {subject} from another one only in case or in spaces at the ends; {kept} kept apart"]


def _line_ends(role: str, ids: Any) -> list[str]:
    """Warn where ids hold a line end, as those do that a misplaced quote makes of several rows."""
    if isinstance(ids, np.ndarray):
        return []
    broken = ids.filter(pc.match_substring_regex(ids, "[\\r\\n]"))
    if not len(broken):
        return []
    subject = "id contains" if len(broken) == 1 else "ids contain"
    return [f"{len(broken):,} {role} {subject} a line end, such as {broken[0].as_py()[:60]!r}; are the quotes right?"]


def _early_times(store: Store, form: TimeForm) -> str:
    first, last = (iso_time(time) for time in time_range(store))
    unit = f" in {form.unit}" if form.kind in ("integer", "decimal") else ""
    return (
        f"most times lie before 1990 (first {first}, last {last}) if they are of the form {form.kind}{unit}; say what "
        "they are with --time-unit, or with --time-format (such as %Y%m%d%H%M)"
    )


def _doubts_about_split(store: Store) -> list[str]:
    """Warn where the split leaves nothing to learn or to measure."""
    split = Split.of(store)
    if not (split.train_end - store.offsets[:-1] >= 2).any():
        return [f"{split.describe()}; no user has two events left to train on"]
    if not (split.test >= 0).any():
        return [f"{split.describe()}; no event is held out"]
    return []


def _order_of_the_file(store: Store) -> str | None:
    """Say how many events are ordered by nothing but the input, where it is worth saying."""
    order, events = store.manifest.ties or ("file", 0)
    if order == "random" or events < _TIES_WORTH_TELLING * store.num_events:
        return None
    return (
        f"{events / store.num_events:.0%} of the events have the time of the user's event before them; the order "
        "of the input says which comes first, and which is held out. Where it means nothing or tells too much, use "
        "--ties random"
    )


def _training_on_the_future(store: Store) -> str | None:
    """Say how much of the training events lie after the held-out ones, where it is worth saying."""
    split = Split.of(store)
    leak = future_leak(store, split)
    if leak is None or leak.later_share < _LEAK_WORTH_TELLING:
        return None
    return (
        f"{split.rule} trains on the future: on average {leak.later_share:.0%} of the training events happen after the "
        f"event to be predicted. That is how published figures are made; --split time:{iso_time(leak.late_time)} "
        "cuts strictly"
    )
