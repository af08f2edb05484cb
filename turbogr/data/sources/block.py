"""What a source gives: blocks of raw columns that know where each of their rows stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turbogr.data.split import LEAVE_TWO_OUT

NO_COLUMN = "none"
QUOTES = ("double", "none")

# The options of reading; a source names those that mean something to it, and any other is refused.
OF_ANY_LOG = ("keep_columns", "where", "text_ids")
OF_FILES = (*OF_ANY_LOG, "drop_bad_rows")
OF_TYPED_FILES = (*OF_FILES, "user_column", "item_column", "time_column", "time_unit", "time_format")
OF_TEXT_FILES = (*OF_TYPED_FILES, "delimiter", "column_names", "quote")


@dataclass(frozen=True)
class RowFilter:
    """A rule on rows: keep those for which `keep` (of the named number columns) is true; `reason` names the others."""

    reason: str
    columns: tuple[str, ...]
    keep: Callable[[dict[str, NDArray[np.float64]]], NDArray[np.bool_]]


@dataclass(frozen=True)
class Columns:
    """The raw columns that play the roles; `time` is None where the order of the rows is all there is."""

    user: str
    item: str
    time: str | None
    actions: tuple[str, ...] = ()
    filters: tuple[RowFilter, ...] = ()

    @property
    def names(self) -> list[str]:
        """Every raw column that must be read, once."""
        wanted = [self.user, self.item, *([self.time] if self.time else []), *self.actions]
        wanted += [name for rule in self.filters for name in rule.columns]
        return list(dict.fromkeys(wanted))


@dataclass(frozen=True)
class Block:
    """Consecutive rows of the input.

    `where(k)` names row k for a message, "log.csv, line 17". `dropped` counts rows that could not even be cut into
    columns, by reason; `progress` is the block's share of `Reader.size`.
    """

    columns: dict[str, pa.Array]
    num_rows: int
    where: Callable[[int], str]
    progress: int
    dropped: dict[str, int] = field(default_factory=dict)


class Reader(Protocol):
    """An opened input. `blocks` yields the work of making each block, so that threads can share it.

    `texts_may_be_numbers` says that the input has no types, so ids that all look like integers are integers.
    """

    columns: Columns
    size: int
    unit: str
    texts_may_be_numbers: bool

    def blocks(self) -> Iterator[Callable[[], Block]]: ...


@dataclass(frozen=True)
class ReadOptions:
    """How to read an input; None or "auto" leaves the choice to the source."""

    user_column: str | None = None
    item_column: str | None = None
    time_column: str | None = None
    keep_columns: tuple[str, ...] = ()
    time_unit: str = "auto"
    time_format: str | None = None
    delimiter: str | None = None
    column_names: tuple[str, ...] = ()
    quote: str | None = None
    text_ids: bool = False
    drop_bad_rows: bool = False
    where: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A kind of input with its published filtering and split as defaults.

    `open(paths, options)` finds the files and the columns; `takes` names the options of reading that it heeds, `extra`
    the options of this source alone with their defaults.
    """

    name: str
    summary: str
    open: Callable[[Sequence[Path], ReadOptions], Reader]
    takes: tuple[str, ...]
    split: str = LEAVE_TWO_OUT
    min_user_events: int = 1
    min_item_events: int = 1
    duplicates: str = "keep"
    extra: dict[str, Any] = field(default_factory=dict)
