"""Features of items and of users from a file or table with a record each, joined by raw id while it is read.

The file is read block by block, and what is kept grows with the items or users and not with the file. The first record
of an id counts; every other one is counted by what was wrong with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.feature_columns import FeatureColumn, FeatureInfo, Kind
from turbogr.data.item_info import ItemAccount
from turbogr.data.prepare.columns import guess_item_column, plain_name, refuse_doubled, usual_columns
from turbogr.data.prepare.feature_kinds import (
    NamedFeature,
    NumberSummary,
    category_texts,
    decoded_texts,
    guess_kind,
    parse_feature,
    plain_values,
)
from turbogr.data.prepare.source import Block, Columns, ReadOptions
from turbogr.data.prepare.sources.delimited import DelimitedReader, Layout, read_lines, read_names, sniff_delimiter
from turbogr.data.prepare.sources.memory_table import TableReader, as_arrow, column_names
from turbogr.data.prepare.sources.parquet import ParquetReader, find_partitioned, open_parquet_file
from turbogr.data.prepare.text_casts import cast_all, cast_each, is_blank, is_text
from turbogr.data.ranges import concatenated_ranges, offsets_of
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array, Vocabulary
from turbogr.errors import UserError, did_you_mean, excerpt

_TEXT = (".csv", ".tsv", ".txt", ".dat")
_PARQUET = (".parquet", ".pq", ".parq")
_MOVIELENS = {3: ("item_id", "title", "genres"), 5: ("user_id", "gender", "age", "occupation", "zip")}
_NAMES_OF_IDS = {"item": ("id", "itemid"), "user": ("id", "userid")}
_MOSTLY_DISTINCT = 0.5
_ENOUGH_ROWS = 100
_LONGEST_NAME = 200  # in bytes; common file systems end at 255


@dataclass(frozen=True)
class FeatureTable:
    """An opened table of features: whose they are (`owner`), its id and feature columns, and how it is read.

    `asked` says that the user named the columns, so that all of them are kept.
    """

    owner: str
    source: str
    id_column: str
    features: tuple[NamedFeature, ...]
    asked: bool
    blocks: Callable[[], Iterator[Callable[[], Block]]]

    @property
    def option(self) -> str:
        return f"--{self.owner}-features"


class _Named(Protocol):
    @property
    def source(self) -> str: ...

    @property
    def id_column(self) -> str: ...


@dataclass(frozen=True)
class JoinedFeatures:
    """What a table says of the rows of a store, and what became of its records."""

    columns: list[FeatureColumn]
    account: ItemAccount
    warnings: list[str]

    def record(self, table: _Named) -> dict[str, Any]:
        """Return the entry of the manifest's settings for the table that it comes from."""
        kept = [column.name for column in self.columns]
        return {"source": table.source, "id": table.id_column, "columns": kept, **dataclasses.asdict(self.account)}


def open_feature_table(
    owner: str, table: Any, id_column: str | None, columns: Sequence[str], log_column: str
) -> FeatureTable:
    """Open a file or a table in memory and choose its columns; `log_column` is what the log calls the item or user.

    Raises:
        UserError: it cannot be read, has no such columns, or no column looks like the id.
    """
    option = f"--{owner}-features"
    source, names, reader = open_columns(table, option)
    chosen = id_column_of(owner, names, id_column, log_column, source, option)
    asked = tuple(parse_feature(text, f"--{owner}-feature-columns") for text in columns)
    for feature in asked:
        if feature.name not in names:
            raise UserError(
                f"{source} has no column {feature.name!r} (--{owner}-feature-columns); it has {_listed(names)}."
                f"{did_you_mean(feature.name, names)}"
            )
    features = asked or tuple(NamedFeature(name) for name in names if name != chosen and name)
    if not features:
        raise UserError(f"{source} has no column beside the id {chosen!r}; {option} needs columns with features")
    for feature in features:
        if "/" in feature.name or "\0" in feature.name or len(feature.name.encode()) > _LONGEST_NAME:
            raise UserError(
                f"{source}: column {feature.name[:80]!r} cannot be the name of a file of the store (it has a slash or "
                f"a zero byte, or more than {_LONGEST_NAME} bytes); rename it"
            )
    read = reader(Columns(chosen, chosen, None, tuple(feature.name for feature in features)))
    return FeatureTable(owner, source, chosen, features, bool(asked), read.blocks)


def open_columns(table: Any, option: str) -> tuple[str, list[str], Callable[[Columns], Any]]:
    """Return what to call a table, the names of its columns, and how to read some of them.

    Raises:
        UserError: it cannot be read; `option` names it.
    """
    if not isinstance(table, str | Path):
        names = column_names(table)
        refuse_doubled(names, f"the table given with {option}")
        return "a table in memory", names, lambda columns: TableReader(as_arrow(table, columns.names), columns)
    path = Path(table)
    if not path.exists():
        raise UserError(f"{path} ({option}) does not exist; check the path")
    suffix = path.suffix.lower() if path.suffix.lower() not in (".gz", ".zst", ".bz2") else Path(path.stem).suffix
    if path.is_dir() or suffix in _PARQUET:
        files = find_partitioned([path])
        first = open_parquet_file(next(iter(files)))
        names = list(first.schema_arrow.names)
        first.close()
        return str(path), names, lambda columns: ParquetReader(files, columns)
    if suffix not in _TEXT:
        raise UserError(
            f"{path} ({option}) has the ending {path.suffix!r}; features are read from {', '.join(_TEXT)} and .parquet"
        )
    layout = _layout(path, suffix)
    names = list(read_names(path, layout))
    return str(path), names, lambda columns: DelimitedReader([path], layout, columns, ReadOptions())


def _layout(path: Path, suffix: str) -> Layout:
    first = next(read_lines(path, Layout(",", quoted=False))).data.split(b"\n", 1)[0].decode("utf-8", "replace")
    fields = first.rstrip("\r").split("::")
    if len(fields) == 1:
        return Layout(sniff_delimiter(path, ReadOptions(), "\t" if suffix == ".tsv" else ","))
    named = any(plain_name(field) in ("movieid", "itemid", "userid", "title") for field in fields)
    usual = _MOVIELENS.get(len(fields)) or ("id", *(f"column_{k}" for k in range(2, len(fields) + 1)))
    return Layout("::", None if named else usual, quoted=False)


def id_column_of(owner: str, names: Sequence[str], named: str | None, log_column: str, source: str, option: str) -> str:
    """Return the column with the ids: the one `named`, the one that the log calls so, or one with a usual name.

    Raises:
        UserError: there is none; `option` names the table.
    """
    if named is not None:
        if named not in names:
            raise UserError(
                f"{source} has no column {named!r} ({option}-id); it has {_listed(names)}.{did_you_mean(named, names)}"
            )
        return named
    if log_column in names:
        return log_column
    found = guess_item_column(names) if owner == "item" else next(iter(usual_columns("user", names)), None)
    found = found or next((name for name in names if plain_name(name) in _NAMES_OF_IDS[owner]), None)
    if found is None:
        raise UserError(
            f"{source}: no column looks like the id of the {owner}s among {_listed(names)}; name it with {option}-id"
        )
    return found


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(excerpt(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def join(table: FeatureTable, ids: Vocabulary, known: Store | None) -> JoinedFeatures:
    """Read a table and return its features for the rows of `ids`; rows of the store `known` keep what it says of them.

    Raises:
        UserError: a value cannot be read, or no record is about a row.
    """
    joiner = RecordJoiner(table.id_column, ids)
    parts: list[_Part] | None = None
    for task in table.blocks():
        block = task()
        records, rows = joiner.rows_of(block)
        if parts is None:
            parts = [_part(feature, block, table, len(ids), known) for feature in table.features]
        for part in parts:
            values = block.columns[part.name].take(pa.array(records))
            part.add(rows, values, partial(_place, block, records))
    assert parts is not None, "readers refuse what has no records"
    account = joiner.account()
    if not account.matched:
        raise UserError(
            f"no record of {table.source} is about {'an item' if table.owner == 'item' else 'a user'} of the log: its "
            f"column {table.id_column!r} has ids like {joiner.example}; name the column with "
            f"{table.option}-id"
        )
    warnings: list[str] = []
    columns = []
    for part in parts:
        column = part.finish()
        words = part.warning(column, account.matched)
        if words is not None:
            warnings.append(f"{table.source}: {words}")
        if words is None or not part.left_out(column, account.matched):
            columns.append(column)
    if not columns:
        raise UserError(
            f"{table.source} has no column that says something of the {table.owner}s: {'; '.join(warnings)}"
        )
    return JoinedFeatures(columns, account, warnings)


def _place(block: Block, records: Int64Array, k: int) -> str:
    """Name the place of the k-th of the `records` of a block, for a message."""
    return block.where(int(records[k]))


class RecordJoiner:
    """Finds the row that a record is about; the first record of an id counts."""

    def __init__(self, id_column: str, ids: Vocabulary) -> None:
        self._column, self._ids = id_column, ids
        self._seen = np.zeros(len(ids), bool)
        self._records = self._unknown = self._without_id = 0
        self.example = ""

    def rows_of(self, block: Block) -> tuple[Int64Array, Int64Array]:
        """Return which records of a block count, and the row that each is about."""
        ids = plain_values(block.columns[self._column])
        if is_text(ids.type):
            ids = decoded_texts(ids)
            ids = pc.if_else(is_blank(ids), pa.scalar(None, pa.large_string()), ids)
        elif pa.types.is_floating(ids.type) or pa.types.is_decimal(ids.type):
            texts = category_texts(ids)
            ids = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.large_string()), texts)
        elif not pa.types.is_integer(ids.type):
            raise UserError(f"{block.where(0)}: the ids in column {self._column!r} are of type {ids.type}")
        given = np.flatnonzero(ids.is_valid().to_numpy(zero_copy_only=False))
        self.example = self.example or ", ".join(repr(value) for value in ids.slice(0, 2).to_pylist())
        rows = self._encode(ids.take(pa.array(given)))
        self._records += block.num_records
        self._without_id += block.num_records - len(given)
        self._unknown += int((rows < 0).sum())
        records, rows = given[rows >= 0], rows[rows >= 0]
        _, first = np.unique(rows, return_index=True)
        first = np.sort(first[~self._seen[rows[first]]])
        self._seen[rows[first]] = True
        return records[first], rows[first]

    def _encode(self, ids: pa.Array) -> Int64Array:
        if not self._ids.is_text and is_text(ids.type):
            numbers = cast_all(ids, pa.int64())  # fast; "07" is not the id 7, as in the log
            if numbers is not None and pc.all(pc.equal(numbers.cast(pa.large_string()), ids)).as_py():
                ids = numbers
        return self._ids.encode(ids)

    def account(self) -> ItemAccount:
        matched = int(self._seen.sum())
        duplicates = self._records - self._without_id - self._unknown - matched
        missing = len(self._ids) - matched
        return ItemAccount(self._records, matched, self._unknown, duplicates, self._without_id, missing)


class _Part:
    """One feature while its table is read: values by row of the store, those of the store that is extended first."""

    def __init__(self, key: str, num_rows: int, asked: bool, known: FeatureColumn | None) -> None:
        self.key, self.name, self.num_rows, self.asked = key, key.partition(".")[2], num_rows, asked
        self.known = known

    def add(self, rows: Int64Array, values: pa.Array, where: Callable[[int], str]) -> None:
        raise NotImplementedError

    def finish(self) -> FeatureColumn:
        raise NotImplementedError

    def warning(self, column: FeatureColumn, matched: int) -> str | None:
        """Return what is odd about a column, None if nothing is."""
        info = column.info
        if info.kind == "vector" or matched < 2:
            return None
        if info.missing == self.num_rows:
            return f"column {self.name!r} has no value for any of them, so it is left out"
        if (info.kind == "number" and info.low == info.high) or (info.kind != "number" and info.size == 1):
            return f"column {self.name!r} is constant, so a model learns nothing from it" + self._advice(
                column, matched
            )
        if self.left_out(column, matched):
            return (
                f"column {self.name!r} has {info.size:,} different values, nearly one for each, so it is left out "
                f"(name it with --{self.key.partition('.')[0]}-feature-columns to keep it)"
            )
        return None

    def _advice(self, column: FeatureColumn, matched: int) -> str:
        return "; it is left out" if self.left_out(column, matched) else "; leave it out"

    def left_out(self, column: FeatureColumn, matched: int) -> bool:
        info = column.info
        if info.missing == self.num_rows:
            return True
        if self.asked or self.known is not None:
            return False
        if info.kind == "number":
            return info.low == info.high
        distinct = info.kind == "category" and matched >= _ENOUGH_ROWS and info.size > _MOSTLY_DISTINCT * matched
        return distinct or (info.kind != "vector" and info.size == 1)


class _Texts:
    """Codes of texts in the order of first appearance, and their vocabulary at the end."""

    def __init__(self, known: Vocabulary | None) -> None:
        self._num_known = 0 if known is None else len(known)
        self._texts = pa.array([], pa.large_string()) if known is None else known.ids.cast(pa.large_string())

    def codes(self, texts: pa.Array) -> Int64Array:
        """Return the code of every text, -1 for ""."""
        encoded = texts.dictionary_encode()
        found = pc.index_in(encoded.dictionary, value_set=self._texts)
        new = encoded.dictionary.filter(pc.and_(found.is_null(), pc.not_equal(encoded.dictionary, "")))
        if len(new):
            self._texts = pa.concat_arrays([self._texts, new])
            found = pc.index_in(encoded.dictionary, value_set=self._texts)
        known = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        return known[encoded.indices.to_numpy(zero_copy_only=False)] if len(texts) else np.zeros(0, np.int64)

    def finish(self) -> tuple[Vocabulary, NDArray[np.int32]]:
        """Return the vocabulary, new texts in ascending order behind the known ones, and the value of every code."""
        first = self._num_known
        order = pc.sort_indices(self._texts.slice(first)).to_numpy().astype(np.int64) + first
        rows = np.arange(len(self._texts), dtype=np.int32)
        rows[order] = np.arange(first, len(self._texts), dtype=np.int32)
        texts = pa.concat_arrays([self._texts.slice(0, first), self._texts.take(pa.array(order))])
        by_text = pc.sort_indices(texts).to_numpy().astype(np.int64)
        return Vocabulary(texts, None if not first or (np.diff(by_text) == 1).all() else by_text), rows


class _CategoryPart(_Part):
    def __init__(self, key: str, num_rows: int, asked: bool, known: FeatureColumn | None) -> None:
        super().__init__(key, num_rows, asked, known)
        self._texts = _Texts(None if known is None else known.vocabulary)
        self._codes = np.full(num_rows, -1, np.int32)
        if known is not None:
            self._codes[: len(known.values)] = known.values

    def add(self, rows: Int64Array, values: pa.Array, where: Callable[[int], str]) -> None:
        self._codes[rows] = self._texts.codes(category_texts(values))

    def finish(self) -> FeatureColumn:
        vocabulary, order = self._texts.finish()
        codes = np.where(self._codes >= 0, order[self._codes], -1).astype(np.int32) if len(order) else self._codes
        info = FeatureInfo("category", len(vocabulary), int((codes < 0).sum()))
        return FeatureColumn(self.key, info, codes, None, vocabulary)


class _CategoriesPart(_Part):
    def __init__(self, key: str, num_rows: int, asked: bool, known: FeatureColumn | None) -> None:
        super().__init__(key, num_rows, asked, known)
        self._texts = _Texts(None if known is None else known.vocabulary)
        self._rows: list[Int64Array] = []  # of values, block by block
        self._codes: list[Int64Array] = []
        self._given = np.zeros(num_rows, bool)
        self.separator = ","

    def add(self, rows: Int64Array, values: pa.Array, where: Callable[[int], str]) -> None:
        lists = values
        if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
            texts = category_texts(values)
            lists = pc.split_pattern(texts, self.separator)
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        codes = self._texts.codes(category_texts(pc.list_flatten(lists)))
        owners = np.repeat(rows, lengths)
        self._given[rows] = True
        self._rows.append(owners[codes >= 0])
        self._codes.append(codes[codes >= 0])

    def finish(self) -> FeatureColumn:
        known = self.known
        if known is not None:
            assert known.offsets is not None
            lengths = np.diff(known.offsets)
            kept = ~self._given[: len(lengths)]
            starts = np.asarray(known.offsets[:-1])[kept]
            self._rows.append(np.repeat(np.flatnonzero(kept), lengths[kept]))
            self._codes.append(np.asarray(known.values[concatenated_ranges(starts, lengths[kept])], np.int64))
        vocabulary, order = self._texts.finish()
        rows, codes = np.concatenate(self._rows), np.concatenate(self._codes)
        by_row = np.argsort(rows, kind="stable")
        values = order[codes[by_row]].astype(np.int32) if len(codes) else np.zeros(0, np.int32)
        lengths = np.bincount(rows, minlength=self.num_rows)
        info = FeatureInfo("categories", len(vocabulary), int((lengths == 0).sum()))
        return FeatureColumn(self.key, info, values, offsets_of(lengths), vocabulary)


class _NumberPart(_Part):
    def __init__(self, key: str, num_rows: int, asked: bool, known: FeatureColumn | None) -> None:
        super().__init__(key, num_rows, asked, known)
        self._values = np.full(num_rows, np.nan, np.float32)
        if known is not None:
            self._values[: len(known.values)] = known.values

    def add(self, rows: Int64Array, values: pa.Array, where: Callable[[int], str]) -> None:
        values = plain_values(values)
        if is_text(values.type):
            texts = decoded_texts(values)
            texts = pc.if_else(is_blank(texts), pa.scalar("nan", pa.large_string()), texts)
            numbers = cast_all(texts, pa.float64())
            if numbers is None:
                numbers, unreadable = cast_each(texts, pa.float64())
                if unreadable.any():
                    first = int(np.argmax(unreadable))
                    raise UserError(
                        f"{where(first)}: {excerpt(texts[first].as_py())} in column {self.name!r} is not a number; if "
                        f"its values are categories, say {self.name}:category"
                    )
        elif pa.types.is_nested(values.type):
            raise UserError(f"{where(0)}: column {self.name!r} is of type {values.type}, not a number")
        else:
            numbers = values.cast(pa.float64(), safe=False)
        found = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
        if np.isinf(found).any():
            first = int(np.argmax(np.isinf(found)))
            raise UserError(f"{where(first)}: column {self.name!r} is infinite; write a number, or leave it empty")
        self._values[rows] = found

    def finish(self) -> FeatureColumn:
        summary = NumberSummary()
        summary.add(self._values)
        info = summary.info()
        if self.known is not None:  # a model that goes on learning must see numbers in the same scale
            scale = self.known.info
            info = dataclasses.replace(info, mean=scale.mean, std=scale.std, log=scale.log)
        return FeatureColumn(self.key, info, self._values)


_PARTS: dict[str, type[_Part]] = {
    "category": _CategoryPart,
    "categories": _CategoriesPart,
    "number": _NumberPart,
}


def _part(feature: NamedFeature, block: Block, table: FeatureTable, num_rows: int, known: Store | None) -> _Part:
    key = f"{table.owner}.{feature.name}"
    before = None if known is None else known.features.get(key)
    kind: Kind = feature.kind or (
        guess_kind(feature.name, block.columns[feature.name], several=True) if before is None else before.info.kind
    )
    if before is not None and before.info.kind != kind:
        raise UserError(
            f"{feature}: in the store to be extended, {key} is of kind {before.info.kind!r}; leave the kind out"
        )
    part = _PARTS[kind](key, num_rows, table.asked, before)
    values = plain_values(block.columns[feature.name])
    if isinstance(part, _CategoriesPart) and is_text(values.type):
        part.separator = "|" if pc.any(pc.match_substring(decoded_texts(values), "|")).as_py() else ","
    return part


def carried(column: FeatureColumn, num_rows: int) -> FeatureColumn:
    """Return a feature of items or users of a store that is extended to `num_rows` rows; new ones have no value."""
    info, values, offsets = column.info, np.asarray(column.values), column.offsets
    new = num_rows - (len(values) // info.size if info.kind == "vector" else len(values))
    if offsets is not None:
        new = num_rows + 1 - len(offsets)
        offsets = np.concatenate([offsets, np.full(new, offsets[-1])])
    else:
        empty = np.full(new * (info.size if info.kind == "vector" else 1), -1 if info.kind == "category" else np.nan)
        values = np.concatenate([values, empty.astype(values.dtype)])
    info = dataclasses.replace(info, missing=info.missing + new)
    return FeatureColumn(column.key, info, values, offsets, column.vocabulary)
