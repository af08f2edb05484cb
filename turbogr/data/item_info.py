"""What the items of a store are: titles and any other column, one row per item.

It is a Parquet file in the store's folder, item_info.parquet, whose row r belongs to item r. It is no part of the
store's content: the content hash does not change, so that runs stay valid when titles are added or corrected later.
`turbogr.data.prepare.item_table` reads the tables that it is made from.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turbogr.checksums import FileChecksum
from turbogr.data.store import ITEM_INFO, Store
from turbogr.data.store_checksums import add_checksum
from turbogr.data.vocabulary import Int64Array, Vocabulary
from turbogr.errors import UserError, did_you_mean, one_line
from turbogr.files import atomic_file

_METADATA = b"turbogr"
_DESCRIBING_COLUMNS = 2
_REMEDY = "add it again with `turbogr item-info STORE FILE`"


@dataclass(frozen=True)
class ItemAccount:
    """What became of the records of a table about items: records = matched + unknown + duplicates + without_id.

    `matched` records belong to an item of the store each, `unknown` ones have an id that the store does not have,
    `duplicates` have the id of an earlier record, which counts. `missing` items of the store have no record.
    """

    records: int
    matched: int
    unknown: int
    duplicates: int
    without_id: int
    missing: int


class ItemInfo:
    """Columns about the items of a store, read from the file when first used.

    `title_column` names the column with the titles, None if there is none; `source` is the file it was made from.
    """

    def __init__(self, store: Store) -> None:
        self.path, self._item_ids = store.path / ITEM_INFO, store.item_ids
        try:
            schema = pq.read_schema(self.path)
            facts = json.loads(schema.metadata[_METADATA])
            self.title_column: str | None = facts["title"]
            self.source: str = facts["source"]
            self.id_column: str = facts["id"]
            self.account = ItemAccount(**facts["account"])
            fingerprint = facts["items"]
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is damaged; {_REMEDY}, or remove it") from error
        if fingerprint != store.item_ids.fingerprint(store.num_items):
            raise UserError(f"{self.path} is about the items of another store; {_REMEDY}, or remove it")
        self.columns: tuple[str, ...] = tuple(schema.names)

    @classmethod
    def of(cls, store: Store) -> ItemInfo | None:
        """Return what is known of the items of `store`, None if nothing was added.

        Raises:
            UserError: the file is damaged, or is about other items.
        """
        return cls(store) if (store.path / ITEM_INFO).exists() else None

    @property
    def has_titles(self) -> bool:
        return self.title_column is not None

    def titles(self, rows: Sequence[int] | Int64Array) -> list[str | None]:
        """Return the title of each item row, None where it has none."""
        if self.title_column is None:
            return [None] * len(rows)
        found = self._column(self.title_column).take(pa.array(np.asarray(rows, np.int64)))
        return [_title(value) for value in found.to_pylist()]

    def titles_of(self, raw_ids: Any) -> list[str | None]:
        """Return the title of each raw item id, None where it has none or is no item of the store."""
        rows = self._item_ids.encode(raw_ids)
        known = np.flatnonzero(rows >= 0)
        titles: list[str | None] = [None] * len(rows)
        for place, title in zip(known.tolist(), self.titles(rows[known]), strict=True):
            titles[place] = title
        return titles

    def values(self, column: str, rows: Sequence[int] | Int64Array) -> list[Any]:
        """Return the values of one column for item rows, None where there is none."""
        found: list[Any] = self._column(column).take(pa.array(np.asarray(rows, np.int64))).to_pylist()
        return found

    def descriptions_of(self, raw_ids: Any) -> list[str]:
        """Return what is said of items beside their titles: the first text columns, such as a genre and a brand."""
        rows = self._item_ids.encode(raw_ids)
        columns = [self.column_of(name, rows).to_pylist() for name in self._describing]
        return [", ".join(text for text in map(_title, values) if text) for values in zip(*columns, strict=True)] or (
            [""] * len(rows)
        )

    def column_of(self, name: str, rows: Int64Array) -> pa.Array:
        """Return a column for item rows, null for row -1; lists are joined to text.

        Raises:
            UserError: there is no such column.
        """
        if name not in self.columns:
            raise UserError(
                f"{self.path} has no column {name!r} about the items.{did_you_mean(name, self.columns)} Columns: "
                f"{', '.join(self.columns)}"
            )
        column = self._column(name)
        if pa.types.is_nested(column.type):
            texts = [", ".join(map(str, value)) if isinstance(value, list) else value for value in column.to_pylist()]
            column = pa.array([None if text is None else str(text) for text in texts], pa.string())
        return column.take(pa.array(rows, mask=rows < 0))

    @functools.cached_property
    def _describing(self) -> list[str]:
        schema = pq.read_schema(self.path)
        others = [field for field in schema if field.name != self.title_column]
        return [field.name for field in others if _is_text(field.type)][:_DESCRIBING_COLUMNS]

    def table(self) -> pa.Table:
        """Return all columns, a row per item in the order of the store's rows, with the raw id first."""
        ids = self._item_ids.ids
        table = pq.read_table(self.path).replace_schema_metadata(None)
        name = self.id_column if self.id_column not in table.schema.names else "item_id"
        return table.add_column(0, name, pa.array(ids) if isinstance(ids, np.ndarray) else ids)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - few objects, which live as long as the store is used
    def _column(self, name: str) -> pa.Array:
        column = pq.read_table(self.path, columns=[name]).column(0).combine_chunks()
        assert len(column) == len(self._item_ids), "one row per item"
        return column


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) or pa.types.is_list(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _title(value: Any) -> str | None:
    text = "" if value is None else str(value).strip()
    return text or None


def write_item_info(
    store: Store, table: pa.Table, *, id_column: str, title_column: str | None, source: str
) -> ItemInfo:
    """Add the columns of `table` to the items of `store` and return them; what was there before is replaced.

    Raises:
        UserError: no record has the id of an item of the store.
    """
    ids = table.column(id_column).combine_chunks()
    ids = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    rows, account = match_items(store.item_ids, ids)
    if account.matched == 0:
        examples = ", ".join(repr(value) for value in ids.slice(0, 2).to_pylist())
        known = ", ".join(repr(value) for value in store.item_ids.decode(np.arange(min(2, store.num_items))).tolist())
        raise UserError(
            f"no record of {source} is about an item of {store.path}: its column {id_column!r} has ids like "
            f"{examples}; the store's items have ids like {known}. Name the column with the items' ids"
        )
    kept = table.drop_columns([id_column]).take(pa.array(rows, mask=rows < 0))
    facts = {"title": title_column, "id": id_column, "source": source, "account": asdict(account)}
    _write(store, kept, facts)
    return ItemInfo(store)


def carry_item_info(known: Store, store: Store) -> ItemInfo | None:
    """Copy what is known of the items of a store to the one that extends it; None if nothing is."""
    info = ItemInfo.of(known)
    if info is None:
        return None
    table = pq.read_table(info.path).replace_schema_metadata(None)
    rows = np.arange(store.num_items)
    kept = table.take(pa.array(rows, mask=rows >= known.num_items))
    missing = info.account.missing + store.num_items - known.num_items
    account = asdict(info.account) | {"missing": missing}
    _write(store, kept, {"title": info.title_column, "id": info.id_column, "source": info.source, "account": account})
    return ItemInfo(store)


def match_items(item_ids: Vocabulary, ids: pa.Array) -> tuple[Int64Array, ItemAccount]:
    """Return for each item the first record with its id, -1 for none, [V], and what became of the records."""
    given = pc.is_valid(ids).to_numpy(zero_copy_only=False)
    found = np.full(len(ids), -1, np.int64)
    found[given] = item_ids.encode(ids.filter(pa.array(given)))
    known = np.flatnonzero(found >= 0)
    items, first = np.unique(found[known], return_index=True)
    rows = np.full(len(item_ids), -1, np.int64)
    rows[items] = known[first]
    without_id = int((~given).sum())
    account = ItemAccount(
        records=len(ids),
        matched=len(items),
        unknown=len(ids) - without_id - len(known),
        duplicates=len(known) - len(items),
        without_id=without_id,
        missing=len(item_ids) - len(items),
    )
    return rows, account


def _write(store: Store, table: pa.Table, facts: dict[str, Any]) -> None:
    facts["items"] = store.item_ids.fingerprint(store.num_items)
    table = table.replace_schema_metadata({_METADATA: json.dumps(facts).encode()})
    path: Path = store.path / ITEM_INFO
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
        add_checksum(store.path, ITEM_INFO, FileChecksum.of(temporary))


def describe_item_info(info: ItemInfo) -> list[str]:
    """Return what was read about the items, and what became of the records, as lines of text."""
    account, others = info.account, [name for name in info.columns if name != info.title_column]
    title = "no column is taken for the title" if info.title_column is None else f"titles from {info.title_column!r}"
    lines = [f"item info from {one_line(info.source)}: ids from {info.id_column!r}, {title}"]
    if others:
        lines[0] += f", also {', '.join(repr(name) for name in others)}"
    return [*lines, *describe_account(account)]


def describe_account(account: ItemAccount, owner: str = "item") -> list[str]:
    """Return what became of the records of a table about items or users, as lines of text."""
    known = account.matched + account.missing
    lines = [f"  {account.matched:,} of {known:,} {owner}s have a record"]
    reasons = {
        f"are about {owner}s that the store does not have": account.unknown,
        "repeat an id; the first record of an id counts": account.duplicates,
        "have no id": account.without_id,
    }
    lines += [f"  {number:,} of {account.records:,} records {what}" for what, number in reasons.items() if number]
    return lines
