"""Tables in memory of three libraries: which one a caller has, and results as the same kind.

Arrow is the common form. pandas is never required: it is imported only where somebody has it already, or asks for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from turbogr.data.prepare.sources.memory_table import arrow_column
from turbogr.errors import UserError, did_you_mean

Kind = Literal["pandas", "polars", "arrow"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def kind_of(value: Any) -> Kind | None:
    """Return which library a table or a column is of, None if it is neither."""
    if isinstance(value, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray):
        return "arrow"
    library = type(value).__module__.partition(".")[0]
    if library == "pandas" and hasattr(value, "iloc"):
        return "pandas"
    if library == "polars" and (hasattr(value, "collect_schema") or hasattr(value, "to_arrow")):
        return "polars"
    return None


def is_table(value: Any) -> bool:
    """Whether a value is a table of pandas, polars or pyarrow, not a single column."""
    if kind_of(value) == "arrow":
        return isinstance(value, pa.Table | pa.RecordBatch)
    return kind_of(value) is not None and hasattr(type(value), "columns")  # asking a lazy frame itself takes long


def default_kind() -> Kind:
    """The kind of tables that most people use: pandas if it is installed, else polars."""
    return "pandas" if importlib.util.find_spec("pandas") is not None else "polars"


def check_kind(kind: Any, others: Sequence[str] = ()) -> None:
    """Raise UserError unless `kind` is one of the three, or of the `others`."""
    known = [*KINDS, *others]
    if kind not in known:
        raise UserError(f"output is {kind!r}; choose from {', '.join(known)}.{did_you_mean(str(kind), known)}")
    if kind == "pandas" and importlib.util.find_spec("pandas") is None:
        raise UserError("output is 'pandas', which is not installed; install it, or choose polars or arrow")


def from_arrow(table: pa.Table, kind: Kind) -> Any:
    """Return an Arrow table as a table of the given kind."""
    if kind == "pandas":
        return table.to_pandas()
    if kind == "polars":
        import polars

        return polars.from_arrow(table)
    return table


def ids_array(values: Any, what: str) -> pa.Array:
    """Return raw ids, a column or a list, as an Arrow array; raises UserError where an id is missing."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        values = values.tolist()
    if isinstance(values, list | tuple):
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
        if len({isinstance(value, str) for value in values}) > 1:
            values = [None if value is None else str(value) for value in values]  # 5 and "5" are the same id
    ids = arrow_column(values, what, "the call")
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if ids.null_count:
        place = ids.is_null().to_pylist().index(True)
        raise UserError(f"{what}, number {place}, has no id; remove it")
    return ids
