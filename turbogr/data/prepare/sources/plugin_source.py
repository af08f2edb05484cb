"""A source of a plug-in: a function or class that is called with the paths and yields blocks of columns.

    @register("source", "sessions", config=SessionOptions)
    def read_sessions(paths, options):
        for path in paths:
            yield {"user_id": [...], "item_id": [...], "timestamp": [...]}

A block is a mapping from names to columns (lists, NumPy or Arrow arrays), or a `Block`, which can also name the place
of a record in messages. Columns play their roles by their names, or by `--user-column` and the like. Values may be of
any type that the built-in sources read; text ids stay text. The function is called again where the log must be read
again.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from turbogr.data.prepare.columns import check_columns, choose_columns
from turbogr.data.prepare.source import OF_TYPED_FILES, Block, Columns, ReadOptions, Source
from turbogr.data.prepare.sources.memory_table import arrow_column
from turbogr.errors import UserError
from turbogr.plugins import Component


@dataclass
class PluginReader:
    """Reads what `read()` yields; `name` is that of the source."""

    name: str
    read: Callable[[], Iterable[Any]]
    columns: Columns
    size: int | None = None
    unit: str = "records"
    texts_may_be_numbers: bool = False

    def blocks(self) -> Iterator[Callable[[], Block]]:
        first = 0
        for given in self.read():
            block = self._block(given, first)
            if block.num_records:
                yield partial(_identity, block)
                first += block.num_records

    def _block(self, given: Any, first: int) -> Block:
        columns = _columns_of(given, self.name)
        where = f"source {self.name!r}, the block from record {first + 1:,} on"
        check_columns(self.columns, list(columns), where)
        arrays = {name: arrow_column(columns[name], name, where) for name in self.columns.names}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise UserError(f"{where}: the columns have different lengths: {lengths}")
        length = next(iter(lengths.values()))
        if isinstance(given, Block):
            return dataclasses.replace(given, columns=arrays, progress=length)
        return Block(arrays, lambda k: f"source {self.name!r}, record {first + k + 1:,}", length)


def _identity(block: Block) -> Block:
    return block


def _columns_of(given: Any, name: str) -> Mapping[str, Any]:
    columns = given.columns if isinstance(given, Block) else given
    if not isinstance(columns, Mapping) or not columns:
        raise UserError(
            f"the source {name!r} yields {type(given).__name__}; yield mappings from names of columns to their values"
        )
    return columns


def plugin_source(component: Component) -> Source:
    """Return the source that a plug-in registered as a function or class."""

    def open_plugin(paths: Sequence[Path], options: ReadOptions) -> PluginReader:
        own = [] if component.config is None else [options.own]
        read = partial(component.factory, list(paths), *own)
        first = next(iter(read()), None)
        if first is None:
            raise UserError(f"the source {component.name!r} yields no records")
        names = list(map(str, _columns_of(first, component.name)))
        return PluginReader(component.name, read, choose_columns(names, options, f"source {component.name!r}"))

    summary = (inspect.getdoc(component.factory) or "").partition("\n")[0]
    return Source(component.name, summary, open_plugin, OF_TYPED_FILES, config=component.config)
