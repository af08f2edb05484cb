"""A table in memory (pandas, polars or pyarrow) as a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from turbogr.data.columns import choose_columns, refuse_doubled
from turbogr.data.sources.block import OF_TYPED_FILES, Block, Columns, ReadOptions, Source
from turbogr.errors import UserError

_BATCH_ROWS = 1 << 19
_UNFIT = (pa.ArrowException, OverflowError, ValueError, TypeError)


@dataclass
class TableReader:
    """Reads an Arrow table in slices."""

    table: pa.Table
    columns: Columns
    texts_may_be_numbers: bool = False
    unit: str = "rows"

    def __post_init__(self) -> None:
        self.size = self.table.num_rows
        if self.size == 0:
            raise UserError("the table holds no rows")

    def blocks(self) -> Iterator[Callable[[], Block]]:
        return (partial(self._block, start) for start in range(0, self.size, _BATCH_ROWS))

    def _block(self, start: int) -> Block:
        piece = self.table.slice(start, _BATCH_ROWS)
        columns = {name: piece[name].combine_chunks() for name in self.columns.names}
        return Block(columns, piece.num_rows, lambda k: f"row {start + k:,} of the table", piece.num_rows)


def as_arrow(table: Any) -> pa.Table:
    """Return a pandas, polars or pyarrow table as an Arrow table; raises UserError for anything else."""
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    library = type(table).__module__.partition(".")[0]
    if library == "polars" and hasattr(table, "collect"):
        table = table.collect()
    if library == "polars" and hasattr(table, "to_arrow"):
        return _converted(table, type(table).to_arrow)
    if library == "pandas" and hasattr(table, "columns"):
        refuse_doubled([str(name) for name in table.columns], "the table")
        return _converted(table, partial(pa.Table.from_pandas, preserve_index=False))
    raise UserError(f"expected a pandas, polars or pyarrow table, got {type(table).__name__}")


def _converted(table: Any, convert: Callable[[Any], pa.Table]) -> pa.Table:
    """Convert a whole table; where that fails, raise UserError with the column that cannot be converted."""
    try:
        return convert(table)
    except _UNFIT as error:
        for name in table.columns:
            try:
                convert(table[[name]])
            except _UNFIT as reason:
                raise UserError(f"column {str(name)!r} of the table {_why(reason)}") from error
        raise UserError(f"the table {_why(error)}") from error


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
        arrow = as_arrow(table)
        refuse_doubled(arrow.column_names, "the table")
        return TableReader(arrow, choose_columns(arrow.column_names, options, "the table"))

    return Source("table", "a pandas, polars or pyarrow table in memory", open_table, OF_TYPED_FILES)
