"""What a source is: it opens an input and yields blocks of raw columns that know where each record stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turbogr.data.prepare.feature_kinds import NamedFeature
from turbogr.data.split import LEAVE_TWO_OUT
from turbogr.plugins import register

NO_COLUMN = "none"
DROPPING = "(--drop-bad-rows drops and counts such records)"
QUOTES = ("double", "none")
DECIMALS = ("point", "comma")

# The options of reading. A source names those that it uses, and any other is refused.
OF_ANY_LOG = ("keep_columns", "actions", "event_features", "where", "text_ids")
OF_FILES = (*OF_ANY_LOG, "drop_bad_rows")
OF_TYPED_FILES = (*OF_FILES, "user_column", "item_column", "time_column", "time_unit", "time_format")
OF_TEXT_FILES = (*OF_TYPED_FILES, "delimiter", "column_names", "quote", "encoding", "decimal")


@dataclass(frozen=True)
class RecordFilter:
    """Keep the records for which `keep` (of the named number columns) is true; `reason` says why others are dropped."""

    reason: str
    columns: tuple[str, ...]
    keep: Callable[[dict[str, NDArray[np.float64]]], NDArray[np.bool_]]


@dataclass(frozen=True)
class Columns:
    """The raw columns by role; `time` is None where the records have an order but no times.

    `actions` are the number columns that are kept. Of these, `predicted` are what users did with the items, and
    `derived` are not in the input but conditions on another column of it. `features` are those of events.
    """

    user: str
    item: str
    time: str | None
    actions: tuple[str, ...] = ()
    filters: tuple[RecordFilter, ...] = ()
    predicted: tuple[str, ...] = ()
    derived: Mapping[str, RecordFilter] = field(default_factory=dict)
    features: tuple[NamedFeature, ...] = ()

    @property
    def numbers(self) -> list[str]:
        """The raw columns that are read as numbers."""
        rules = [*self.filters, *self.derived.values()]
        read = [name for name in self.actions if name not in self.derived]
        return list(dict.fromkeys([*read, *(name for rule in rules for name in rule.columns)]))

    @property
    def names(self) -> list[str]:
        """Every raw column that must be read, once."""
        wanted = [self.user, self.item, *([self.time] if self.time else []), *self.numbers]
        wanted += [feature.name for feature in self.features]
        return list(dict.fromkeys(wanted))


@dataclass(frozen=True)
class Block:
    """Consecutive records of the input.

    Attributes:
        columns: raw values by name, all of the same length.
        where: names record k of the block for a message, such as "log.csv, line 17".
        progress: the block's share of `Reader.size`.
        dropped: how many records could not even be cut into columns, by reason.
    """

    columns: Mapping[str, pa.Array]
    where: Callable[[int], str]
    progress: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        return len(next(iter(self.columns.values())))


class Reader(Protocol):
    """An opened input.

    Attributes:
        columns: which raw columns it reads.
        unit: in which `size` and `Block.progress` count.
        texts_may_be_numbers: the input has no types, so ids that all look like integers are integers.
    """

    columns: Columns
    unit: str
    texts_may_be_numbers: bool

    @property
    def size(self) -> int | None:
        """The length of the input for the progress bar, None if it is unknown."""
        ...

    def blocks(self) -> Iterator[Callable[[], Block]]:
        """Yield the work of making each block, so that threads can share it; may be called again to read again."""
        ...


@dataclass(frozen=True)
class OwnTables:
    """Tables of features that come with a log, and its actions and features of events, where the user asks for none.

    A source whose own options have a method `own_tables` returns them, or None for none.
    """

    items: Any
    users: Any
    actions: tuple[str, ...]
    event_features: tuple[str, ...]


@dataclass(frozen=True)
class ReadOptions:
    """How to read an input; None or "auto" leaves the choice to the source. `own` are the source's own options."""

    user_column: str | None = None
    item_column: str | None = None
    time_column: str | None = None
    keep_columns: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    event_features: tuple[str, ...] = ()
    time_unit: str = "auto"
    time_format: str | None = None
    delimiter: str | None = None
    column_names: tuple[str, ...] = ()
    quote: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    text_ids: bool = False
    drop_bad_rows: bool = False
    where: tuple[str, ...] = ()
    own: Any = None

    def changed(self) -> list[str]:
        """Return the names of the options that differ from their default."""
        return [option.name for option in fields(self) if getattr(self, option.name) != option.default]


@dataclass(frozen=True)
class Source:
    """A kind of input with its published filtering and split as defaults.

    Attributes:
        open: finds the files and the columns of `paths`.
        takes: the options of reading that it uses.
        config: the dataclass of the options that it alone has, `ReadOptions.own`; None if it has none.
        actions, event_features: what `all` stands for in the options of these names.
        plugin: what the manifest records of the plug-in that registered it; None for a built-in source.
    """

    name: str
    summary: str
    open: Callable[[Sequence[Path], ReadOptions], Reader]
    takes: tuple[str, ...]
    split: str = LEAVE_TWO_OUT
    min_user_events: int = 1
    min_item_events: int = 1
    duplicates: str = "keep"
    config: type | None = None
    actions: tuple[str, ...] = ()
    event_features: tuple[str, ...] = ()
    plugin: dict[str, str | None] | None = None

    @property
    def own_names(self) -> list[str]:
        """Names of the options that it alone has."""
        return [] if self.config is None else [option.name for option in fields(self.config)]


def register_built_in(source: Source) -> None:
    """Register a source of this package; a plug-in calls `turbogr.plugins.register`."""
    register("source", source.name, config=source.config)(source)


def option(default: Any, help: str) -> Any:
    """Declare a field of a source's own options, with the help text of its command-line option."""
    return field(default=default, metadata={"help": help})
