"""Parquet: files, folders, globs and partitioned folders, read row group by row group without a copy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from turbogr.data.prepare.columns import check_columns, choose_columns, refuse_doubled
from turbogr.data.prepare.source import OF_TYPED_FILES, Block, Columns, ReadOptions, Source, register_built_in
from turbogr.data.prepare.sources.input_files import find_files, partition_root, refuse_repeated
from turbogr.errors import UserError

_BATCH_ROWS = 1 << 19
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_DAMAGE = (pa.ArrowException, OSError, ValueError)  # a name that is not UTF-8 is a ValueError


@dataclass
class ParquetReader:
    """Reads Parquet files of one schema, as far as the chosen columns go; `files` gives each its partition's values."""

    files: Mapping[Path, dict[str, str]]
    columns: Columns
    texts_may_be_numbers: bool = False
    unit: str = "records"

    def __post_init__(self) -> None:
        self.size = 0
        self._numbers = _numeric_partitions(self.files.values())
        paths = list(self.files)
        kinds: dict[str, tuple[str, Path]] = {}
        for file, partition in self.files.items():
            opened = open_parquet_file(file)
            names = [*opened.schema_arrow.names, *partition]
            refuse_doubled(opened.schema_arrow.names, str(file))
            check_columns(self.columns, names, str(file))
            for name in self.columns.names:
                self._check_kind(name, opened.schema_arrow, file, kinds)
            self.size += opened.metadata.num_rows
            opened.close()
        if self.size == 0:
            raise UserError(
                f"{paths[0]} and all other files hold no records" if len(paths) > 1 else f"{paths[0]} holds no records"
            )

    def _check_kind(self, name: str, schema: pa.Schema, file: Path, kinds: dict[str, tuple[str, Path]]) -> None:
        """Refuse a column that is a number in one file and text in another."""
        if name in schema.names and pa.types.is_null(schema.field(name).type):
            return  # a file without rows, or without a value in this column, has no type
        kind = _kind(schema.field(name).type) if name in schema.names else "partition"
        known, first = kinds.setdefault(name, (kind, file))
        if kind != known:
            raise UserError(
                f"column {name!r} is {known} in {first} but {kind} in {file}; write the parts with one schema"
            )

    def blocks(self) -> Iterator[Callable[[], Block]]:
        for file, partition in self.files.items():
            opened = open_parquet_file(file)
            constants = {k: v for k, v in partition.items() if k not in opened.schema_arrow.names}
            stored = [name for name in self.columns.names if name not in constants]
            first = 0
            try:
                for batch in opened.iter_batches(_BATCH_ROWS, columns=stored, use_threads=False):
                    yield _BlockOf(batch, constants, self._numbers, self.columns.names, file, first)
                    first += batch.num_rows
            except _DAMAGE as error:
                raise UserError(f"{file} is damaged near row {first:,}: {_one_line(error)}") from error
            finally:
                opened.close()


@dataclass(frozen=True)
class _BlockOf:
    """Makes a Block of a record batch that starts at row `first` of the file."""

    batch: pa.RecordBatch
    constants: dict[str, str]
    numbers: frozenset[str]
    names: list[str]
    file: Path
    first: int

    def __call__(self) -> Block:
        rows = self.batch.num_rows
        return Block(
            columns={
                name: _constant(self.constants[name], name in self.numbers, rows)
                if name in self.constants
                else self.batch.column(name)
                for name in self.names
            },
            where=lambda k: f"{self.file}, row {self.first + k + 1:,}",
            progress=rows,
        )


def _constant(value: str, number: bool, rows: int) -> pa.Array:
    """A partition's value as a column."""
    kind = pa.int64() if number else pa.string()
    if value == _NULL_PARTITION:
        return pa.nulls(rows, kind)
    return pa.repeat(pa.scalar(int(value) if number else value, kind), rows)


def _numeric_partitions(partitions: Iterable[dict[str, str]]) -> frozenset[str]:
    """Keys of partitions whose values are all integers; a folder's name has no type."""
    values: dict[str, set[str]] = {}
    for partition in partitions:
        for key, value in partition.items():
            values.setdefault(key, set()).add(value)
    integer = re.compile(r"0|-?[1-9][0-9]{0,17}")
    return frozenset(
        key for key, found in values.items() if all(integer.fullmatch(value) for value in found - {_NULL_PARTITION})
    )


def partition_values(file: Path, root: Path) -> dict[str, str]:
    """Return the keys and values of the key=value folders between `root` and a file."""
    pairs = (part.split("=", 1) for part in file.parent.relative_to(root).parts if "=" in part)
    return {key: unquote(value) for key, value in pairs}


def find_partitioned(paths: Sequence[Path]) -> dict[Path, dict[str, str]]:
    """Find the Parquet files in what was given, each with the values of its partition.

    Files that are named one by one, as a shell does with a glob, share the root that all of them lie in.
    """
    if not paths:
        raise UserError("name the Parquet files to read: turbogr prepare parquet PATH... --out DIR")
    singles = [path.parent for path in paths if path.is_file()]
    shared = (
        Path(os.path.commonpath(singles)) if singles and len({path.is_absolute() for path in singles}) == 1 else None
    )
    found: dict[Path, dict[str, str]] = {}
    for path in paths:
        root = shared if shared is not None and path.is_file() else partition_root(path)
        for file in find_files([path], (".parquet", ".pq", ".parq"), "Parquet files"):
            if file in found:
                refuse_repeated([file, file])
            found[file] = partition_values(file, root)
    refuse_repeated(list(found))
    return found


def open_parquet_file(file: Path) -> pq.ParquetFile:
    """Open one file; raises UserError where it is not a whole Parquet file."""
    if file.stat().st_size == 0:
        raise UserError(f"{file} is empty")
    try:
        opened = pq.ParquetFile(pa.OSFile(os.fsencode(file)), page_checksum_verification=True)
        opened.schema_arrow.names  # noqa: B018 - decodes the schema, which opening does not
        return opened
    except _DAMAGE as error:
        raise UserError(f"{file} is not a whole Parquet file: {_one_line(error)}") from error


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0):
        return "an integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "a decimal"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    return str(kind)


def _one_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def open_parquet(paths: Sequence[Path], options: ReadOptions) -> ParquetReader:
    """Open Parquet files."""
    files = find_partitioned(paths)
    first, partition = next(iter(files.items()))
    opened = open_parquet_file(first)
    names = [*opened.schema_arrow.names, *(key for key in partition if key not in opened.schema_arrow.names)]
    refuse_doubled(opened.schema_arrow.names, str(first))
    opened.close()
    return ParquetReader(files, choose_columns(names, options, str(first)))


register_built_in(
    Source("parquet", "Parquet files, folders or globs, partitioned or not", open_parquet, OF_TYPED_FILES)
)
