"""Files that `turbogr recommend` reads: histories of users, and lists of items. Text stays text, so 007 is an id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from turbogr.data.prepare.columns import refuse_doubled, usual_columns
from turbogr.errors import UserError, did_you_mean

FORMATS = (".csv", ".tsv", ".parquet", ".jsonl")
_DELIMITERS = ("\t", ";", "|", ",")


def read_table(path: Path, option: str) -> pa.Table:
    """Read a .csv, .tsv, .parquet or .jsonl file that `option` names.

    Raises:
        UserError: another format, no records, or a file that cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"{option} {path} has the ending '{path.suffix}'; choose from {', '.join(FORMATS)}")
    if not path.is_file():
        raise UserError(f"{option} {path} {'is a folder' if path.is_dir() else 'does not exist'}; check the path")
    try:
        if suffix == ".parquet":
            table = pa.parquet.read_table(path)
        elif suffix == ".jsonl":
            table = pa.json.read_json(path)
        else:
            table = _read_delimited(path)
    except (pa.ArrowException, pl.exceptions.PolarsError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    refuse_doubled(table.schema.names, str(path))
    if not table.num_rows:
        raise UserError(f"{option} {path} holds no records")
    return table


def read_items(path: Path, option: str, column: str | None = None) -> list[Any]:
    """Return the raw items of a file: one per line, or the item column of a table.

    Raises:
        UserError: no such column, no item, or a file that cannot be read.
    """
    if path.suffix.lower() not in FORMATS:
        if not path.is_file():
            raise UserError(f"{option} {path} {'is a folder' if path.is_dir() else 'does not exist'}; check the path")
        items = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    else:
        table = read_table(path, option)
        items = table.column(_item_column(path, table.schema.names, column)).drop_null().to_pylist()
    if not items:
        raise UserError(f"{option} {path} has no item in it; leave {option} out")
    return items


def delimiter_of(path: Path) -> str:
    """Return what separates the columns of a .tsv or .csv file: a tab, or whatever the header of a .csv has."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline()
    return "\t" if path.suffix.lower() == ".tsv" else next((d for d in _DELIMITERS if d in header), ",")


def _item_column(path: Path, names: list[str], asked: str | None) -> str:
    if asked is not None and asked not in names:
        raise UserError(f"{path} has no column '{asked}'.{did_you_mean(asked, names)} Columns: {', '.join(names)}")
    found = [asked] if asked is not None else (usual_columns("item", names) or (names if len(names) == 1 else []))
    if len(found) != 1:
        raise UserError(
            f"which column of {path} has the items? Name it with --item-column. Columns: {', '.join(names)}"
        )
    return found[0]


def _read_delimited(path: Path) -> pa.Table:
    table = pl.read_csv(path, separator=delimiter_of(path), infer_schema=False).to_arrow()
    names = [name.strip().strip("\ufeff") for name in table.schema.names]
    return table.rename_columns(names)
