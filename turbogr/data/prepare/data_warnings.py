"""What looks odd in a log but can be prepared: sentences for the user, none of them an error."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.prepare.time_column import LONG_UNITS, TICKS, UNITS, OddTimes, TimeForm, unit_that_fits
from turbogr.data.split import Split, future_leak, time_range
from turbogr.data.store import Store
from turbogr.data.times import iso_time
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import excerpt
from turbogr.option_names import in_terms_of_caller

FIRST_USUAL_TIME = 631_152_000  # 1990
_LEAK_WORTH_A_NOTE = 0.01
_TIES_WORTH_A_NOTE = 0.05

# How programs write that a value is missing, in lower case and without spaces at the ends.
_WORDS_FOR_MISSING = ("", "null", "nan", "none", "na", "n/a", "<na>", "nil", "nat", "undefined", "\\n", "-", "?")


class DataWarning(UserWarning):
    """Something in the data looks odd but works; the user should look at it."""

    def __str__(self) -> str:
        return in_terms_of_caller(super().__str__())


def similar_ids(role: str, ids: Int64Array | pa.Array) -> list[str]:
    """Warn of ids that differ only in case or in spaces at their ends; they stay different."""
    if isinstance(ids, np.ndarray):
        return []
    plain = pc.utf8_lower(pc.utf8_trim_whitespace(ids))
    again = len(plain) - pc.count_distinct(plain).as_py()
    if not again:
        return []
    subject, kept = ("id differs", "it is") if again == 1 else ("ids differ", "they are")
    return [f"{again:,} {role} {subject} from another one only in case or in spaces at the ends; {kept} kept apart"]


def ids_with_line_ends(role: str, ids: Int64Array | pa.Array) -> list[str]:
    """Warn of ids that contain a line end; a misplaced quote makes such ids of several records."""
    if isinstance(ids, np.ndarray):
        return []
    broken = ids.filter(pc.match_substring_regex(ids, "[\\r\\n]"))
    if not len(broken):
        return []
    subject = "id contains" if len(broken) == 1 else "ids contain"
    return [f"{len(broken):,} {role} {subject} a line end, such as {broken[0].as_py()[:60]!r}; are the quotes right?"]


def doubtful_ids(role: str, ids: Int64Array | pa.Array, events: Callable[[], Int64Array]) -> list[str]:
    """Warn of text ids that look like missing values or have spaces at their ends; they are kept as they are.

    `events` counts the events of every id; it is called only if there is a warning.
    """
    if isinstance(ids, np.ndarray):
        return []
    doubts = []
    trimmed = pc.utf8_trim_whitespace(ids)
    words = pa.array(_WORDS_FOR_MISSING, trimmed.type)
    rows = np.flatnonzero(pc.is_in(pc.utf8_lower(trimmed), words).to_numpy(zero_copy_only=False))
    if len(rows):
        listed = ", ".join(excerpt(ids[row].as_py()) for row in rows[:5].tolist()) + (", ..." if len(rows) > 5 else "")
        count, article = int(events()[rows].sum()), "an" if role == "item" else "a"
        subject = "1 event names" if count == 1 else f"{count:,} events name"
        doubts.append(
            f"{subject} {article} {role} that looks like a missing value ({listed}); it is kept as an id. "
            "Fields left empty are refused, or dropped and counted with --drop-bad-rows"
        )
    spaced = len(ids) - pc.sum(pc.equal(ids, trimmed)).as_py()
    if spaced:
        doubts.append(f"{spaced:,} of {len(ids):,} {role} ids begin or end with spaces, which are kept as part of them")
    return doubts


def early_times(store: Store, form: TimeForm) -> str:
    """Say that most times lie before 1990, which is usually a wrong unit."""
    first, last = time_range(store)
    unit = f" in {form.unit}" if form.kind in ("integer", "decimal") else ""
    said = (
        f"most times lie before 1990 (first {iso_time(first)}, last {iso_time(last)}) if they are of the form "
        f"{form.kind}{unit}"
    )
    meant = unit_that_fits(last) if form.unit == "s" else None
    if meant is not None:
        return f"{said}; the last one is {iso_time(last * LONG_UNITS[meant])} with --time-unit={meant}, so try that"
    return (
        f"{said}; say what they are with --time-unit ({', '.join(UNITS[1:])}), or with --time-format (such as "
        "%Y%m%d%H%M). Times that count from another start than 1970 are fine: only their differences and order are used"
    )


def corrupt_times(odd: OddTimes, num_records: int, column: str, form: TimeForm) -> list[str]:
    """Point out times before 1990 and after tomorrow in a log in which most times are usual ones."""
    found = []
    if odd.early:
        found.append(
            f"{odd.early:,} of {num_records:,} times lie before 1990, the first is {odd.first_early}; they come first "
            "in their users' histories. Do they stand for missing times? "
            f"{_dropping(column, '>=', FIRST_USUAL_TIME, form)}"
        )
    if odd.late:
        tomorrow = (int(time.time()) // 86400 + 1) * 86400
        found.append(
            f"{odd.late:,} of {num_records:,} times lie in the future, the first is {odd.first_late}; they are the "
            f"last of their users and held out. Are they wrong? {_dropping(column, '<=', tomorrow, form)}"
        )
    return found


def _dropping(column: str, comparison: str, seconds: int, form: TimeForm) -> str:
    """Say how to drop records by their time; conditions are on numbers alone."""
    if form.kind not in ("integer", "decimal"):
        return "Then remove these records from the log"
    bound = seconds * TICKS.get(form.unit, 1) // LONG_UNITS.get(form.unit, 1)
    return f"--where='{column} {comparison} {bound}' drops these records"


def useless_split(store: Store) -> list[str]:
    """Warn of a split that leaves nothing to train on or nothing to measure."""
    split = Split.of(store)
    if not (split.train_end - store.offsets[:-1] >= 2).any():
        return [f"{split.describe()}; no user has two events left to train on"]
    if not (split.test >= 0).any():
        return [f"{split.describe()}; no event is held out"]
    return []


def ties_in_file_order(store: Store) -> str | None:
    """Say how many events have only the input's order between them; None where they are few."""
    order, events = store.manifest.ties or ("file", 0)
    if order == "random" or events < _TIES_WORTH_A_NOTE * store.num_events:
        return None
    return (
        f"{events / store.num_events:.0%} of the events have the time of the user's event before them; the order "
        "of the input says which comes first, and which is held out. If that order means nothing or reveals too much, "
        "use --ties=random"
    )


def training_on_the_future(store: Store) -> str | None:
    """Say which share of the training events lies after the held-out ones; None where it is small."""
    split = Split.of(store)
    leak = future_leak(store, split)
    if leak is None or leak.later_share < _LEAK_WORTH_A_NOTE:
        return None
    return (
        f"{split.rule} trains on the future: on average {leak.later_share:.0%} of the training events happen after the "
        f"event to be predicted. That is how published figures are made; --split=time:{iso_time(leak.late_time)} "
        "cuts strictly"
    )
