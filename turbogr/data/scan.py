"""The one pass over the input: check every row, collect the distinct ids, and spill keys and times to disk."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.ids import DistinctIds, KeyCollision, KeyedIds
from turbogr.data.ordered import ordered_map
from turbogr.data.progress import Progress
from turbogr.data.rows import RowParser, Rows, TextIdsFound
from turbogr.data.sources.block import Block, Reader, ReadOptions
from turbogr.data.spill import Spill
from turbogr.data.times import TimeForm, TimeFormChanged
from turbogr.errors import UserError

ACTION = "action."


@dataclass
class ActionRange:
    """What the values of an action column need: a whole-number type, or a decimal one."""

    low: float = np.inf
    high: float = -np.inf
    whole: bool = True
    missing: int = 0

    def add(self, values: NDArray[np.float64]) -> None:
        present = values[~np.isnan(values)]
        self.missing += len(values) - len(present)
        if len(present):
            self.low, self.high = min(self.low, float(present.min())), max(self.high, float(present.max()))
            self.whole = self.whole and bool((present == np.rint(present)).all())

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The smallest integer type for whole numbers without gaps, else float64 (NaN where a value is missing)."""
        if self.missing or not self.whole or not np.isfinite(self.low):
            return np.dtype(np.float64)
        for kind in (np.int8, np.int16, np.int32):
            if np.iinfo(kind).min <= self.low and self.high <= np.iinfo(kind).max:
                return np.dtype(kind)
        return np.dtype(np.int64)


@dataclass
class Scan:
    """The checked log: `spill` holds "user" and "item" keys, "time" ticks and actions, in the order of the input.

    `users` and `items` are the distinct ids, users with counts.
    """

    spill: Spill
    users: KeyedIds
    items: KeyedIds
    time_form: TimeForm | None
    rows_in: int
    dropped: Counter[str]
    actions: dict[str, ActionRange] = field(default_factory=dict)


def scan(
    reader: Reader, options: ReadOptions, kinds: dict[str, str], scratch: Path, threads: int, progress: Progress
) -> Scan:
    """Read the whole input once; again from the start where it turns out to be of another kind than its beginning.

    `kinds` may fix "user" and "item" to "integer" or "text"; what is not fixed is found out.

    Raises:
        UserError: a row is wrong and bad rows are not to be dropped.
    """
    settled = {role: kinds.get(role, "text" if options.text_ids else "integer") for role in ("user", "item")}
    parser = RowParser(reader.columns, options, settled, reader.texts_may_be_numbers, 0, None)
    changes: dict[str, Any] = {}
    while True:
        try:
            return _scan_once(reader, parser, changes, scratch, threads, progress)
        except TextIdsFound as found:
            if found.role in kinds:
                raise UserError(
                    f"{found.role} ids are integers in the store to be extended, but text in the log"
                ) from None
            parser = dataclasses.replace(parser, kinds={**parser.kinds, found.role: "text"})
        except TimeFormChanged as found:
            changes |= found.changes
        except KeyCollision:
            parser = dataclasses.replace(parser, hash_seed=parser.hash_seed + 1)


def _scan_once(
    reader: Reader, parser: RowParser, changes: dict[str, Any], scratch: Path, threads: int, progress: Progress
) -> Scan:
    tasks = iter(reader.blocks())
    first = next(tasks, None)
    if first is None:
        raise UserError("the input holds no rows")
    first_block = first()
    form = None if reader.columns.time is None else _settle_times(reader, parser, first_block)
    if form is not None:
        form = dataclasses.replace(form, **changes)
    parser = dataclasses.replace(parser, time_form=form)
    first_rows = parser.parse(first_block)  # alone: most inputs show their kind here, before more is read in vain

    names = [ACTION + name for name in reader.columns.actions]
    columns = {"user": np.int64, "item": np.int64, "time": np.int64, **dict.fromkeys(names, np.float64)}
    spill = Spill(scratch, "rows", columns)
    users, items = DistinctIds(), DistinctIds()
    actions = {name: ActionRange() for name in reader.columns.actions}
    result = Scan(spill, users.finish(), items.finish(), form, 0, Counter(), actions)
    others = ordered_map(lambda task: parser.parse(task()), tasks, threads)
    try:
        with contextlib.closing(others), progress.stage("reading", reader.size, reader.unit) as bar:
            for rows in itertools.chain([first_rows], others):
                users.add(rows.users)
                items.add(rows.items)
                _spill(rows, result)
                bar.update(rows.progress)
        result.users, result.items = users.finish(), items.finish()
    except BaseException:
        spill.remove()
        raise
    return result


def _settle_times(reader: Reader, parser: RowParser, first_block: Block) -> TimeForm:
    """Decide how times are written on the first block that has a readable one; others are read again afterwards."""
    if parser.tells_times(first_block) or not parser.options.drop_bad_rows:
        return parser.settle_times(first_block)
    others = (task() for task in itertools.islice(reader.blocks(), 1, None))
    return parser.settle_times(next(filter(parser.tells_times, others), first_block))


def _spill(rows: Rows, result: Scan) -> None:
    first = result.spill.length
    # Where the log has an order but no times, the number of the row takes the place of the time.
    ticks = np.arange(first, first + len(rows.users.keys)) if rows.ticks is None else rows.ticks
    columns: dict[str, NDArray] = {"user": rows.users.keys, "item": rows.items.keys, "time": ticks}
    for name, values in rows.actions.items():
        columns[ACTION + name] = values
        result.actions[name].add(values)
    result.spill.append(columns)
    result.rows_in += rows.rows_in
    result.dropped += rows.dropped
