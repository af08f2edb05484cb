"""The one pass over the input: check every record, collect the distinct ids, write keys and times to disk."""

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

from turbogr.data.prepare.id_keys import DistinctIds, KeyCollision, KeyedIds
from turbogr.data.prepare.ordered_map import ordered_map
from turbogr.data.prepare.progress_bar import Progress
from turbogr.data.prepare.records import RecordParser, Records, TextIdsFound
from turbogr.data.prepare.source import Block, Reader, ReadOptions
from turbogr.data.prepare.spilling import Spill
from turbogr.data.prepare.time_column import OddTimes, TimeForm, TimeFormChanged
from turbogr.errors import UserError

ACTION = "action."
EVENT = "event."


@dataclass
class ActionRange:
    """The range of an action column's values, which decides its type in the store."""

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
    """The checked log: `spill` holds "user" and "item" keys, "time" ticks, actions and features of events.

    They are in the order of the input. `features` has the distinct categories of every such feature, None for numbers.

    `users` and `items` are the distinct ids, users with counts. `records_in` counts all records, `dropped` those that
    later stages drop too, by reason.
    """

    spill: Spill
    users: KeyedIds
    items: KeyedIds
    time_form: TimeForm | None
    records_in: int
    dropped: Counter[str]
    odd_times: OddTimes = field(default_factory=OddTimes)
    actions: dict[str, ActionRange] = field(default_factory=dict)
    features: dict[str, KeyedIds | None] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        """Records that no stage has dropped so far."""
        return self.records_in - sum(self.dropped.values())

    @property
    def account(self) -> str:
        """What became of the records, in one line for a message."""
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.dropped.items()))
        return f"{self.records_in:,} records in, dropped {reasons or 'none'}"


def scan(
    reader: Reader, options: ReadOptions, kinds: dict[str, str], scratch: Path, threads: int, progress: Progress
) -> Scan:
    """Read the whole input once, or again from the start if ids or times turn out to differ from its beginning.

    `kinds` may fix "user" and "item" to "integer" or "text"; otherwise the ids decide.

    Raises:
        UserError: a record is wrong and bad records are not to be dropped.
    """
    first_kinds = {role: kinds.get(role, "text" if options.text_ids else "integer") for role in ("user", "item")}
    parser = RecordParser(reader.columns, options, first_kinds, reader.texts_may_be_numbers, 0, None)
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
    reader: Reader, parser: RecordParser, changes: dict[str, Any], scratch: Path, threads: int, progress: Progress
) -> Scan:
    tasks = iter(reader.blocks())
    first = next(tasks, None)
    if first is None:
        raise UserError("the input holds no records")
    first_block = first()
    form = None if reader.columns.time is None else _detect_time_form(reader, parser, first_block)
    if form is not None:
        form = dataclasses.replace(form, **changes)
    parser = dataclasses.replace(parser, time_form=form, features=parser.feature_kinds(first_block))
    # Alone, because the first block usually shows whether the input must be read again in another way.
    first_records = parser.parse(first_block)

    names = [ACTION + name for name in reader.columns.actions]
    columns: dict[str, Any] = {"user": np.int64, "item": np.int64, "time": np.int64, **dict.fromkeys(names, np.float64)}
    categories = {name: DistinctIds() for name, (kind, _) in parser.features.items() if kind == "category"}
    columns |= {EVENT + name: np.int64 if name in categories else np.float64 for name in parser.features}
    spill = Spill(scratch, "records", columns)
    users, items = DistinctIds(), DistinctIds()
    actions = {name: ActionRange() for name in reader.columns.actions}
    result = Scan(spill, users.finish(), items.finish(), form, 0, Counter(), actions=actions)
    others = ordered_map(lambda task: parser.parse(task()), tasks, threads)
    try:
        with contextlib.closing(others), progress.stage("reading", reader.size, reader.unit) as bar:
            for records in itertools.chain([first_records], others):
                users.add(records.users)
                items.add(records.items)
                for name, distinct in categories.items():
                    distinct.add(records.features[name])  # type: ignore[arg-type]
                _append(records, result)
                bar.update(records.progress)
        result.users, result.items = users.finish(), items.finish()
        result.features = {name: categories[name].finish() if name in categories else None for name in parser.features}
    except BaseException:
        spill.remove()
        raise
    return result


def _detect_time_form(reader: Reader, parser: RecordParser, first_block: Block) -> TimeForm:
    """Decide how times are written on the first block that has a readable one; `blocks` is read again afterwards."""
    if parser.has_readable_time(first_block) or not parser.options.drop_bad_rows:
        return parser.detect_time_form(first_block)
    others = (task() for task in itertools.islice(reader.blocks(), 1, None))
    return parser.detect_time_form(next(filter(parser.has_readable_time, others), first_block))


def _append(records: Records, result: Scan) -> None:
    """Append the records of a block to the temporary columns and to the account."""
    first = result.spill.length
    # In a log without times, the number of the record serves as its time.
    ticks = np.arange(first, first + len(records.users.keys)) if records.ticks is None else records.ticks
    columns: dict[str, NDArray] = {"user": records.users.keys, "item": records.items.keys, "time": ticks}
    for name, values in records.actions.items():
        columns[ACTION + name] = values
        result.actions[name].add(values)
    for name, found in records.features.items():
        columns[EVENT + name] = found if isinstance(found, np.ndarray) else found.keys
    result.spill.append(columns)
    result.records_in += records.num_in
    result.dropped += records.dropped
    result.odd_times.add(records.odd_times)
