"""A table in memory (pandas, polars or pyarrow) as a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from turbogr.data.prepare.columns import choose_columns, refuse_doubled
from turbogr.data.prepare.source import OF_TYPED_FILES, Block, Columns, ReadOptions, Source
from turbogr.errors import UserError

_BATCH_ROWS = 1 << 19
_UNFIT = (pa.ArrowException, OverflowError, ValueError, TypeError)


@dataclass
class TableReader:
    """Reads an Arrow table in slices."""

    table: pa.Table
    columns: Columns
    texts_may_be_numbers: bool = False
    unit: str = "records"

    def __post_init__(self) -> None:
        self.size = self.table.num_rows
        if self.size == 0:
            raise UserError("the table holds no records")

    def blocks(self) -> Iterator[Callable[[], Block]]:
        return (partial(self._block, start) for start in range(0, self.size, _BATCH_ROWS))

    def _block(self, start: int) -> Block:
        piece = self.table.slice(start, _BATCH_ROWS)
        columns = {name: piece[name].combine_chunks() for name in self.columns.names}
        return Block(columns, lambda k: f"row {start + k + 1:,} of the table", piece.num_rows)


def column_names(table: Any) -> list[str]:
    """Return the names of the columns of a pandas, polars or pyarrow table; raises UserError for anything else."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        return list(table.schema.names)
    library = type(table).__module__.partition(".")[0]
    if library == "polars" and hasattr(table, "collect_schema"):
        return list(table.collect_schema().names())
    if library == "pandas" and hasattr(table, "columns"):
        return [str(name) for name in table.columns]
    raise UserError(f"expected a pandas, polars or pyarrow table, got {type(table).__name__}")


def as_arrow(table: Any, names: Sequence[str]) -> pa.Table:
    """Return the named columns of a table as an Arrow table; raises UserError where one cannot be converted."""
    if isinstance(table, pa.Table | pa.RecordBatch):
        return pa.table({name: table.column(name) for name in names})
    if hasattr(table, "iloc"):
        numbers = [column_names(table).index(name) for name in names]
        columns = {name: table.iloc[:, k] for name, k in zip(names, numbers, strict=True)}
        return pa.table({name: arrow_column(values, name, "the table") for name, values in columns.items()})
    chosen = table.select(names)
    chosen = chosen.collect() if hasattr(chosen, "collect") else chosen
    return pa.table({name: arrow_column(chosen.get_column(name), name, "the table") for name in names})


def arrow_column(values: Any, name: str, where: str) -> pa.Array:
    """Return a column (pandas, polars, NumPy, Arrow or a list) as an Arrow array.

    Raises:
        UserError: it cannot be converted; the message says so of column `name` of `where`.
    """
    try:
        if not isinstance(values, pa.Array | pa.ChunkedArray):
            values = values.to_arrow() if hasattr(values, "to_arrow") else pa.Array.from_pandas(values)
    except _UNFIT as error:
        raise UserError(f"column {name!r} of {where} {_why(error)}") from error
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _why(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return "holds an integer that does not fit 64 bits"
    if isinstance(error, UnicodeEncodeError):
        return "holds text that is not valid Unicode (half of a surrogate pair)"
    return f"cannot be converted, does it hold values of several types? ({error.args[0] if error.args else error})"


def table_source(table: Any) -> Source:
    """Return a source that reads `table` instead of files."""

    def open_table(paths: Sequence[Path], options: ReadOptions) -> TableReader:
        assert not paths, "a table has no paths"
        names = column_names(table)
        refuse_doubled(names, "the table")
        columns = choose_columns(names, options, "the table")
        return TableReader(as_arrow(table, columns.names), columns)

    return Source("table", "a pandas, polars or pyarrow table in memory", open_table, OF_TYPED_FILES)
