"""Content vectors of items from a file or table with a vector each, joined by raw id while it is read.

Vectors go to a memory-mapped file of one row per item, so a catalogue's vectors need not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.feature_columns import FeatureColumn, FeatureInfo
from turbogr.data.prepare.feature_kinds import plain_values
from turbogr.data.prepare.feature_table import JoinedFeatures, RecordJoiner, id_column_of, open_columns
from turbogr.data.prepare.source import Block, Columns
from turbogr.data.prepare.text_casts import cast_all, is_text
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array, Vocabulary
from turbogr.errors import UserError

OPTION = "--item-vectors"
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class VectorTable:
    """An opened table of vectors: a single column of lists, or a column of numbers for each of their elements."""

    name: str
    source: str
    id_column: str
    columns: tuple[str, ...]
    blocks: Callable[[], Iterator[Callable[[], Block]]]


def open_vector_table(table: Any, id_column: str | None, log_column: str) -> VectorTable:
    """Open a file or a table in memory.

    Raises:
        UserError: it cannot be read, or no column looks like the id.
    """
    source, names, reader = open_columns(table, OPTION)
    chosen = id_column_of("item", names, id_column, log_column, source, OPTION)
    columns = tuple(name for name in names if name != chosen and name)
    if not columns:
        raise UserError(f"{source} has no column beside the id {chosen!r}; {OPTION} needs a column of vectors")
    name = columns[0] if len(columns) == 1 else Path(table).stem if isinstance(table, str | Path) else "vector"
    return VectorTable(name, source, chosen, columns, reader(Columns(chosen, chosen, None, columns)).blocks)


def join_vectors(table: VectorTable, ids: Vocabulary, known: Store | None, scratch: Path) -> JoinedFeatures:
    """Read a table and return its vectors for the rows of `ids`, in a file in `scratch`; see `feature_table.join`.

    Raises:
        UserError: vectors differ in width, hold no numbers, or no record is about an item.
    """
    key = f"item.{table.name}"
    before = None if known is None else known.features.get(key)
    width = 0 if before is None else before.info.size
    joiner = RecordJoiner(table.id_column, ids)
    values: NDArray[np.float32] | None = None
    damaged = 0
    for task in table.blocks():
        block = task()
        records, rows = joiner.rows_of(block)
        found = _vectors(table, block, width, OPTION if before is None else "the store to be extended")
        if values is None:
            width = found.shape[1]
            values = np.lib.format.open_memmap(scratch / "vectors.npy", "w+", np.float32, (len(ids), width))
            for first in range(0, len(ids), _ROWS_AT_ONCE):
                values[first : first + _ROWS_AT_ONCE] = np.nan
            if before is not None:
                values[: len(before.values) // width] = before.values.reshape(-1, width)
        values[rows] = found[records]
        damaged += int((~np.isfinite(found[records])).any(1).sum())
    account = joiner.account()
    if values is None or not account.matched:
        raise UserError(
            f"no record of {table.source} is about an item of the log: its column {table.id_column!r} has ids like "
            f"{joiner.example}; name the column with {OPTION}-id"
        )
    missing = 0
    for first in range(0, len(ids), _ROWS_AT_ONCE):
        piece = values[first : first + _ROWS_AT_ONCE]
        wrong = ~np.isfinite(piece).all(1)
        piece[wrong] = np.nan
        missing += int(wrong.sum())
    warnings = []
    if damaged:
        those = "1 vector holds" if damaged == 1 else f"{damaged:,} vectors hold"
        warnings.append(f"{table.source}: {those} values that are missing or infinite, so their items have none")
    column = FeatureColumn(key, FeatureInfo("vector", width, missing), values)
    return JoinedFeatures([column], account, warnings)


def _vectors(table: VectorTable, block: Block, width: int, expected_by: str) -> NDArray[np.float32]:
    """Return the vectors of a block [n, width], NaN where there is none; `width` 0: that of the first."""
    first = plain_values(block.columns[table.columns[0]])
    if len(table.columns) > 1:
        columns = [_numbers(table, name, block) for name in table.columns]
        if width and len(columns) != width:
            raise UserError(f"{table.source} has vectors of {len(columns)} numbers, but {expected_by} has {width}")
        return np.stack(columns, 1)
    if not _is_list(first.type):
        raise UserError(f"{block.where(0)}: column {table.columns[0]!r} is of type {first.type}, not a list of numbers")
    lengths: Int64Array = pc.fill_null(pc.list_value_length(first), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    given = lengths > 0
    if not width:
        if not given.any():
            raise UserError(
                f"{block.where(0)}: column {table.columns[0]!r} has no vector in the first {len(first):,} "
                "records; put one of them first"
            )
        width = int(lengths[np.argmax(given)])
        expected_by = "the first"
    odd = np.flatnonzero(given & (lengths != width))
    if len(odd):
        raise UserError(
            f"{block.where(int(odd[0]))}: a vector of {int(lengths[odd[0]])} numbers, but {expected_by} has {width}; "
            "all must have the same width"
        )
    flat = pc.list_flatten(first)
    if not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
        raise UserError(f"{block.where(0)}: column {table.columns[0]!r} holds lists of {flat.type}, not of numbers")
    found = np.full((len(first), width), np.nan, np.float32)
    numbers = pc.fill_null(flat.cast(pa.float32(), safe=False), float("nan"))
    found[given] = numbers.to_numpy(zero_copy_only=False).reshape(-1, width)
    return found


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _numbers(table: VectorTable, name: str, block: Block) -> NDArray[np.float32]:
    values = plain_values(block.columns[name])
    if is_text(values.type):
        values = values.cast(pa.large_binary()).cast(pa.large_string())
        values = pc.if_else(pc.equal(values, ""), pa.scalar(None, pa.large_string()), values)
    numbers = None if pa.types.is_nested(values.type) else cast_all(values, pa.float32())
    if numbers is None:
        raise UserError(
            f"{block.where(0)}: column {name!r} of {table.source} holds no numbers; {OPTION} takes a column of lists, "
            "or columns that are all numbers beside the id"
        )
    return pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
