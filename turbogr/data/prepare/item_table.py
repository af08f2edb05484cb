"""Tables about items, such as movies.csv: which file formats are read, and which column is the id and which the title.

Text stays text, so that an id such as 007 is not changed; columns of Parquet files and tables in memory keep their
types. Catalogues fit into memory: they have a record per item, not per event.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from turbogr.data.item_info import ItemInfo, write_item_info
from turbogr.data.prepare.columns import guess_item_column, plain_name, refuse_doubled
from turbogr.data.prepare.sources.memory_table import as_arrow, column_names
from turbogr.data.store import Store
from turbogr.errors import Note, UserError, did_you_mean, excerpt, warn_caller

FORMATS = (".csv", ".tsv", ".txt", ".dat", ".item", ".parquet")
_MOVIELENS = ("item_id", "title", "genres")
_DELIMITERS = ("::", "\t", ";", "|", ",")

# Usual names of the column with titles, the first that is there counts.
_TITLES = (
    "title", "name", "itemtitle", "itemname", "producttitle", "productname", "productdisplayname",
    "displayname", "movietitle", "moviename", "booktitle", "bookname", "songtitle", "songname", "tracktitle",
    "trackname", "artistname", "videotitle", "videoname", "gametitle", "gamename", "articletitle",
    "newstitle", "headline", "primarytitle", "originaltitle", "venuename", "businessname", "caption", "label",
    "description", "productdescription", "producttype",
)  # fmt: skip


@dataclass(frozen=True)
class ItemTable:
    """A table about items as it was read: `table` with the named columns, and `source`, where it came from."""

    table: pa.Table
    id_column: str
    title_column: str | None
    source: str

    def add_to(self, store: Store) -> ItemInfo:
        """Store the table with the items of `store`; see `write_item_info` for what it raises."""
        return write_item_info(
            store, self.table, id_column=self.id_column, title_column=self.title_column, source=self.source
        )


def add_item_info(
    store: Store | str | os.PathLike[str],
    items: Any,
    *,
    id_column: str | None = None,
    title_column: str | None = None,
) -> ItemInfo:
    """Add titles and other columns about the items to a prepared store, whose content and hash stay the same.

    `items` is a .csv, .tsv, .dat or .parquet file or a pandas, polars or pyarrow table with a record per item.
    `id_column` has the raw ids of the items, `title_column` their titles; both are guessed by the usual names. All
    other columns are kept. What was added before is replaced.

    Raises:
        UserError: no store, a file that cannot be read, no column that looks like the id, a named column that is not
            there, or no record about an item of the store.
    """
    store = store if isinstance(store, Store) else Store.open(store)
    log_column = (store.manifest.settings.get("columns") or {}).get("item")
    return read_item_table(items, id_column, title_column, log_column=log_column).add_to(store)


def read_item_table(
    items: Any, id_column: str | None = None, title_column: str | None = None, *, log_column: str | None = None
) -> ItemTable:
    """Read a file or a table in memory, and choose its columns; `log_column` is what the log calls the item.

    Raises:
        UserError: see `add_item_info`.
    """
    if isinstance(items, str | os.PathLike):
        path = Path(items)
        table, source = _read_file(path), str(path)
    else:
        names = column_names(items)
        refuse_doubled(names, "the table about items")
        table, source = as_arrow(items, names), "a table in memory"
    names = table.schema.names
    for option, named in (("id", id_column), ("title", title_column)):
        if named is not None and named not in names:
            raise UserError(
                f"{source} has no column {named!r}, named as the {option} of the items; it has "
                f"{_listed(names)}.{did_you_mean(named, names)}"
            )
    chosen = id_column or _guess_id(names, log_column, source)
    title = title_column or _guess_title([name for name in names if name != chosen])
    if table.num_rows == 0:
        raise UserError(f"{source} holds no records")
    return ItemTable(table, chosen, title, source)


def _guess_id(names: Sequence[str], log_column: str | None, source: str) -> str:
    if log_column in names:
        return str(log_column)
    found = guess_item_column(names) or next((name for name in names if plain_name(name) in ("id", "itemid")), None)
    if found is None:
        raise UserError(
            f"{source}: no column looks like the id of the items among {_listed(names)}; name it with --item-info-id "
            "(turbogr item-info: --id-column). Is the first line no header? Then add one"
        )
    return found


def _guess_title(names: Sequence[str]) -> str | None:
    plain = {plain_name(name): name for name in reversed(names)}
    usual = next((plain[title] for title in _TITLES if title in plain), None)
    return names[0] if usual is None and len(names) == 1 else usual


def _read_file(path: Path) -> pa.Table:
    if path.suffix.lower() not in FORMATS:
        raise UserError(
            f"{path} has the ending '{path.suffix}'; a table about items is read from {', '.join(FORMATS)} files"
        )
    if not path.is_file():
        raise UserError(f"{path} {'is a folder, not a file' if path.is_dir() else 'does not exist'}; check the path")
    try:
        table = pq.read_table(path) if path.suffix.lower() == ".parquet" else _read_text(path)
    except (pa.ArrowException, csv.Error) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    refuse_doubled(table.schema.names, str(path))
    return table


def _read_text(path: Path) -> pa.Table:
    text = _decode(path.read_bytes(), path)
    first = text.partition("\n")[0].rstrip("\r")
    if not first.strip():
        raise UserError(
            f"{path} is empty" if not text.strip() else f"{path}: the first line is empty; it names columns"
        )
    delimiter = "\t" if path.suffix.lower() == ".tsv" else next((d for d in _DELIMITERS if d in first), ",")
    records = _records(text, delimiter)
    names: Sequence[str] = records.pop(0)[1]
    if delimiter == "::" and not any(plain_name(name) in ("movieid", "itemid", "title") for name in names):
        records.insert(0, (1, list(names)))  # MovieLens' files have no header
        names = (
            _MOVIELENS if len(names) == 3 else ["item_id", "title", *(f"column_{k}" for k in range(3, len(names) + 1))]
        )
    for line, values in records:
        if len(values) != len(names):
            raise UserError(
                f"{path}, line {line}: {len(values)} values for {len(names)} columns; fix the line, or quote what has "
                f"{excerpt(delimiter)} in it"
            )
    columns = zip(*(values for _, values in records), strict=True) if records else [[] for _ in names]
    arrays = [pa.array([value or None for value in column], pa.large_string()) for column in columns]
    return pa.table(arrays, names=[name.strip() for name in names])


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        warn_caller(f"{path} is not UTF-8; it is read as Latin-1 (Windows-1252)", Note)
        return data.decode("cp1252", "replace")


def _records(text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return (line, values) of every record that is not blank; only CSV and its like know quotes."""
    if delimiter == "::":
        lines = enumerate(text.splitlines(), start=1)
        return [(number, line.split("::")) for number, line in lines if line.strip()]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    return [(reader.line_num, values) for values in reader if any(value.strip() for value in values)]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(excerpt(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")
