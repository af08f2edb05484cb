"""A column of times: integers or decimals since 1970 in any unit, ISO text, dates, Arrow timestamps.

A column has one form, detected in the first block with a readable time: how it is written, its unit, and the
resolution in which it is sorted (the store keeps whole seconds). Times before 1970 or after 2200 are refused, because
they are nearly always a wrong unit.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.prepare.text_casts import cast_all, cast_each, comma_hint, is_blank, is_text
from turbogr.data.times import END_OF_TIME, EPOCH, iso_nanoseconds
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, did_you_mean, excerpt

TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
LONG_UNITS = {"min": 60, "h": 3600, "d": 86400}
"""Units longer than a second, in seconds. They must be named: small numbers may also be seconds from another start."""
UNITS = ("auto", *TICKS, *LONG_UNITS)
_OTHER_NAMES = {
    "s": "sec secs second seconds",
    "ms": "msec millis millisecond milliseconds",
    "us": "usec micros microsecond microseconds",
    "ns": "nsec nanos nanosecond nanoseconds",
    "min": "mins minute minutes",
    "h": "hr hrs hour hours",
    "d": "day days",
}
_MOSTLY = 0.9
_USUAL_TIMES = (631_152_000, 4_102_444_800)  # 1990 to 2100
_SHORTHANDS = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S", "%R": "%H:%M", "%D": "%m/%d/%y", "%e": "%d"}


@dataclass(frozen=True)
class TimeForm:
    """How a time column is written, and the `resolution` of the result.

    `kind` is integer, decimal, YYYYMMDD (numbers like 20220501), iso, format or timestamp.
    """

    kind: str
    unit: str
    resolution: str
    guessed: bool = False
    format: str | None = None

    @property
    def ticks_per_second(self) -> int:
        return TICKS[self.resolution]


def read_unit(text: object) -> str:
    """Return a unit of times as `UNITS` has it; its full name is read too, such as days.

    Raises:
        UserError: it is none.
    """
    lower = str(text).lower()
    unit = next((unit for unit, names in _OTHER_NAMES.items() if lower in names.split()), str(text))
    if unit not in UNITS:
        known = [*UNITS, *" ".join(_OTHER_NAMES.values()).split()]
        meant = " Did you mean 'min' or 'ms'?" if lower == "m" else did_you_mean(lower, known)
        raise UserError(f"--time-unit must be one of {', '.join(UNITS)}, got {text!r}.{meant}")
    return unit


def unit_that_fits(number: float) -> str | None:
    """Return the long unit in which a number is a usual time, None if it is in none."""
    return next((unit for unit, length in LONG_UNITS.items() if _is_usual(number * length)), None)


def _is_usual(seconds: float) -> bool:
    return _USUAL_TIMES[0] <= seconds < _USUAL_TIMES[1]


@dataclass(frozen=True)
class Times:
    """Parsed `ticks` [n] and, per value, why it is not a time: reason 0 is good, see `REASONS`."""

    ticks: Int64Array
    reasons: NDArray[np.int8]


@dataclass
class OddTimes:
    """Times that can be read but are probably wrong: how many, and the first of them with its place.

    `early` lie before 1990, `late` after tomorrow.
    """

    early: int = 0
    late: int = 0
    first_early: str | None = None
    first_late: str | None = None

    @classmethod
    def of(cls, ticks: Int64Array, form: TimeForm, say: Callable[[int], str]) -> OddTimes:
        """Find them among `ticks`; `say` describes value k of them with its place."""
        low, high = (int(bound) * form.ticks_per_second for bound in (_USUAL_TIMES[0], time.time() + 86400))
        early, late = np.flatnonzero(ticks < low), np.flatnonzero(ticks > high)
        return cls(
            len(early),
            len(late),
            say(int(early[0])) if len(early) else None,
            say(int(late[0])) if len(late) else None,
        )

    def add(self, other: OddTimes) -> None:
        """Add those of the next block."""
        self.early, self.late = self.early + other.early, self.late + other.late
        self.first_early = self.first_early or other.first_early
        self.first_late = self.first_late or other.first_late


REASONS = ("", "missing time", "unreadable time", "negative time", "time after the year 2200", "time of another unit")
MISSING, UNREADABLE, NEGATIVE, FAR_FUTURE, OTHER_UNIT = range(1, 6)


def has_readable_time(values: pa.Array) -> bool:
    """Whether some value is readable as a time, so that `detect_form` can decide on these values."""
    if values.null_count == len(values):
        return False
    if pa.types.is_floating(values.type):
        return bool(pc.any(pc.is_finite(values)).as_py())
    if not is_text(values.type):
        return True
    texts = _without_blanks(_texts(values))
    return bool(pc.any(_written_as_number(texts)).as_py()) or _some_iso(texts)


def detect_form(values: pa.Array, name: str, unit: str, format: str | None) -> TimeForm:
    """Decide the form of the column `name` from its first values.

    Raises:
        UserError: the column's type cannot hold times, the format cannot be understood, the unit in the column's name
            does not fit the values, or a unit or format is given for a column that has none.
    """
    kind = values.type
    if unit != "auto" and format is not None:
        raise UserError("--time-unit is for times that are numbers, --time-format for text; leave one of them out")
    if (unit != "auto" or format is not None) and (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        option = "--time-unit" if format is None else "--time-format"
        raise UserError(f"column {name!r} is of type {kind}, which needs no {option}; leave it out")
    if format is not None:
        return _written_form(format)
    if pa.types.is_timestamp(kind):
        return TimeForm("timestamp", kind.unit, kind.unit)
    if pa.types.is_date(kind):
        return TimeForm("timestamp", "s", "s")
    if pa.types.is_integer(kind):
        return _number_form("integer", values, name, unit)
    if pa.types.is_floating(kind):
        return _number_form("decimal", values, name, unit)
    if not is_text(kind):
        raise UserError(f"column {name!r} is of type {kind}, which is no time; use numbers, ISO text or timestamps")
    texts = _without_blanks(_texts(values))
    for written, target in (("integer", pa.int64()), ("decimal", pa.float64())):
        if (cast := cast_all(texts, target)) is not None:
            return _number_form(written, cast, name, unit)
    numbers = pc.mean(_written_as_number(texts).cast(pa.float64())).as_py() or 0.0
    if numbers > 0.5 or (numbers and not _some_iso(texts)):
        readable = texts.filter(pc.match_substring_regex(texts, r"^[0-9]{1,18}$"))
        return _number_form("integer", readable.cast(pa.int64()), name, unit)
    if unit != "auto":
        raise UserError(
            f"--time-unit={unit} is for numbers, but column {name!r} holds text like {texts[0].as_py()[:40]!r}; "
            "leave it out"
        )
    fine = pc.any(pc.match_substring_regex(texts, _FINER_THAN_MICROSECONDS)).as_py()
    return TimeForm("iso", "us", "ns" if fine else "us")


def _written_as_number(texts: pa.Array) -> pa.Array:
    return pc.match_substring_regex(texts, r"^\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*$")


def _some_iso(texts: pa.Array) -> bool:
    """Whether one of the texts is an ISO date or time; usually one of the first is."""
    parts = (_iso_ticks(part, "ns") for part in (texts[:100], texts[100:]))
    return any(part.null_count < len(part) for part in parts)


def _written_form(format: str) -> TimeForm:
    """Check `format` on a known time, so that a mistake in it is not reported as one in the data."""
    said = f"--time-format={format!r}"
    plain = re.sub("%.", lambda match: _SHORTHANDS.get(match.group(), match.group()), format)
    if not re.search("%[YyGcx]", plain.replace("%%", "")):
        raise UserError(f"{said} does not name the year (%Y); write it like %d/%m/%Y or '%Y-%m-%d %H:%M:%S'")
    try:
        datetime.datetime.strptime(EPOCH.strftime(plain), plain)
    except (ValueError, re.error) as error:
        raise UserError(
            f"{said} is no format of dates that can be read ({error}); write it like %d/%m/%Y or '%Y-%m-%d %H:%M:%S'"
        ) from None
    return TimeForm("format", "s", "us" if "%f" in plain.replace("%%", "") else "s", format=plain)


def _number_form(kind: str, values: pa.Array, name: str, unit: str) -> TimeForm:
    numbers = pc.drop_null(values).to_numpy(zero_copy_only=False).astype(np.float64)
    if unit == "auto" and _mostly_days(numbers):
        return TimeForm("YYYYMMDD", "s", "s")
    if unit == "auto" and _mostly_days(np.floor(numbers / 10**6)):
        return _written_form("%Y%m%d%H%M%S")
    guess = _guess_unit(values)
    suffix = re.search(r"_(s|ms|us|ns)$", name.lower())
    if unit != "auto":
        guessed = False
    elif (long_unit := _long_unit_of_name(name)) is not None and _is_usual(_middle(values) * LONG_UNITS[long_unit]):
        unit, guessed = long_unit, False
    elif suffix:
        unit = suffix.group(1)
        _check_suffix(values, name, unit, guess)
        guessed = unit == guess
    else:
        unit, guessed = guess, True
    if unit in LONG_UNITS:
        return TimeForm(kind, unit, "s" if kind == "integer" else "us", guessed)
    return TimeForm(kind, unit, unit if kind == "integer" else "us", guessed)


def _long_unit_of_name(name: str) -> str | None:
    """Return the long unit that a column's name ends with, such as that of `time_hours`."""
    last = re.split(r"[^a-z]+", name.lower())[-1]
    return next((unit for unit in LONG_UNITS if last in _OTHER_NAMES[unit].split() and last != name.lower()), None)


def _check_suffix(values: pa.Array, name: str, unit: str, guess: str) -> None:
    """Raise UserError where times in the unit of the name lie near 1970, but are usual ones in a coarser unit."""
    middle = _middle(values)
    if TICKS[guess] < TICKS[unit] and _USUAL_TIMES[0] <= middle / TICKS[guess] < _USUAL_TIMES[1]:
        days = {ticks: EPOCH + datetime.timedelta(seconds=middle / TICKS[ticks]) for ticks in (unit, guess)}
        raise UserError(
            f"column {name!r} holds times like {middle:.0f}: {days[unit]:%Y-%m-%d} if its unit is {unit!r} as the name "
            f"says, but {days[guess]:%Y-%m-%d} in {guess!r}; say --time-unit={guess} or --time-unit={unit}"
        )


def _mostly_days(numbers: NDArray[np.float64]) -> bool:
    """Whether the numbers are days like 20220501; of 27 other numbers of that size, one is a day by chance."""
    days = _day_seconds(numbers)
    return len(days) > 0 and float(((days >= 0) & (days < END_OF_TIME)).mean()) > _MOSTLY


def _day_seconds(numbers: NDArray[np.float64]) -> Int64Array:
    """Return the seconds at which the days written as 20220501 begin; -1 where a number is no day since 1970."""
    whole = np.where((numbers >= 1970_01_01) & (numbers <= 9999_12_31), numbers, 0).astype(np.int64)
    years, months, days = whole // 10_000, whole // 100 % 100, whole % 100
    begin = ((years - 1970) * 12 + months - 1).astype("datetime64[M]")
    length = ((begin + 1).astype("datetime64[D]") - begin.astype("datetime64[D]")).astype(np.int64)
    valid = (whole == numbers) & (months >= 1) & (months <= 12) & (days >= 1) & (days <= length)
    seconds = (begin.astype("datetime64[D]").astype(np.int64) + days - 1) * 86400
    return np.where(valid & (whole > 0), seconds, -1)


def _guess_unit(values: pa.Array) -> str:
    """Return the unit in which the middle value lies between 1970 and 2200, the coarsest that does."""
    middle = _middle(values)
    return next((unit for unit, ticks in TICKS.items() if middle < END_OF_TIME * ticks), "s")


def _middle(values: pa.Array) -> float:
    numbers = np.abs(pc.drop_null(values).to_numpy(zero_copy_only=False).astype(np.float64))
    numbers = numbers[np.isfinite(numbers)]
    return float(np.median(numbers)) if len(numbers) else 0.0


def parse_times(values: pa.Array, form: TimeForm) -> Times:
    """Read a block of times in the form of their column; a value that is no time gets a reason, never a guess."""
    missing = values.is_null().to_numpy(zero_copy_only=False)
    if missing.all():  # the column may then have any type
        return Times(np.zeros(len(values), np.int64), np.full(len(values), MISSING, np.int8))
    if form.kind == "timestamp":
        ticks = _timestamp_ticks(values, form)
        unreadable = np.zeros(len(values), bool)
    elif form.kind in ("integer", "decimal", "YYYYMMDD"):
        ticks, missing, unreadable = _number_ticks(values, form, missing)
    else:
        ticks, missing, unreadable = _text_ticks(values, form, missing)
    reasons = np.zeros(len(values), np.int8)
    reasons[ticks < 0] = NEGATIVE
    reasons[ticks >= END_OF_TIME * form.ticks_per_second] = FAR_FUTURE
    if form.guessed and form.unit != "s":
        smaller = END_OF_TIME * form.ticks_per_second // 1000
        reasons[(ticks >= 0) & (ticks < smaller)] = OTHER_UNIT
    reasons[unreadable] = UNREADABLE
    reasons[missing] = MISSING
    return Times(ticks, reasons)


def explain(reason: int, text: str, form: TimeForm, name: str) -> str:
    """Say what is wrong with the time written as `text` in the column `name`, and what to do."""
    shown = excerpt(text)
    if reason == MISSING:
        return f"the time (column {name!r}) is missing"
    if reason == UNREADABLE:
        examples = {
            "iso": "a date or time like 2022-05-01 or 2022-05-01T12:30:00",
            "YYYYMMDD": "a day like 20220501, which most times are (--time-unit=s would read them all as seconds)",
        }
        expected = examples.get(form.kind, "a number")
        if form.kind == "format":
            expected = f"of the format {form.format!r}"
        remedy = comma_hint(text) or f"; --time-format names other ways of writing it{_likely_format(text)}"
        return f"the time {shown} (column {name!r}) is not {expected}{remedy}"
    if reason == NEGATIVE:
        return f"the time {shown} (column {name!r}) is negative"
    if reason == FAR_FUTURE:
        if form.kind not in ("integer", "decimal"):
            return f"the time {shown} (column {name!r}) lies after the year 2200"
        year = f"lies after the year 2200 if its unit is {form.unit!r}"
        return f"the time {shown} (column {name!r}) {year}{_in_another_unit(text, form)}; see --time-unit"
    return (
        f"the time {shown} (column {name!r}) does not fit the unit {form.unit!r} that most times have"
        f"{_in_another_unit(text, form)}; say --time-unit={form.unit} if it is right"
    )


def _likely_format(text: str) -> str:
    """Return examples of --time-format for a day that is written with the year at its end; "" for others."""
    found = re.match(r"\s*\d{1,2}([./-])\d{1,2}\1\d{4}(\s+\d{1,2}:\d{2}(:\d{2})?)?\s*$", text)
    if found is None:
        return ""
    mark, clock = found[1], (" %H:%M:%S" if found[3] else " %H:%M") if found[2] else ""
    orders = [("d", "m")] if mark == "." else [("d", "m"), ("m", "d")]
    shown = " or ".join(f"--time-format='%{one}{mark}%{two}{mark}%Y{clock}'" for one, two in orders)
    return f", for instance {shown}"


def _in_another_unit(text: str, form: TimeForm) -> str:
    """Say what time it would be in another unit; "" if it is a usual one in none."""
    try:
        number = float(text)
    except ValueError:
        return ""
    unit = next((unit for unit, ticks in TICKS.items() if unit != form.unit and _is_usual(number / ticks)), None)
    if unit is None:
        return ""
    day = EPOCH + datetime.timedelta(seconds=number / TICKS[unit])
    return f", but is {day:%Y-%m-%d} in {unit!r}" + (": the column mixes units" if form.guessed else "")


def _timestamp_ticks(values: pa.Array, form: TimeForm) -> Int64Array:
    if pa.types.is_date(values.type):
        values = values.cast(pa.timestamp("s"))
    values = values.cast(pa.timestamp(form.resolution, tz=values.type.tz), safe=False)
    return pc.fill_null(values.view(pa.int64()), 0).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _number_ticks(
    values: pa.Array, form: TimeForm, missing: NDArray[np.bool_]
) -> tuple[Int64Array, NDArray[np.bool_], NDArray[np.bool_]]:
    unreadable = np.zeros(len(values), bool)
    if is_text(values.type):
        values = _texts(values)
        missing = missing | is_blank(values).to_numpy(zero_copy_only=False)
        target = pa.int64() if form.kind == "integer" else pa.float64()
        numbers = cast_all(values, target)
        if numbers is None:
            numbers = cast_all(pc.utf8_trim_whitespace(values), target)
        if numbers is None:
            numbers, unreadable = cast_each(values, target)
            if form.kind == "integer" and _some_decimals(values.filter(pa.array(unreadable))):
                raise TimeFormChanged(kind="decimal", resolution="us")
        values = numbers
    if form.kind == "integer":
        if pa.types.is_floating(values.type):
            raise TimeFormChanged(kind="decimal", resolution="us")
        if pa.types.is_uint64(values.type):
            values = pc.min_element_wise(values, pa.scalar(2**63 - 1, pa.uint64())).cast(pa.int64())
        whole = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        return _as_ticks(whole, form.unit), missing, unreadable
    decimals = pc.fill_null(values.cast(pa.float64(), safe=False), 0.0).to_numpy(zero_copy_only=False)
    if form.kind == "YYYYMMDD":
        seconds = _day_seconds(decimals)
        return np.maximum(seconds, 0), missing, (seconds < 0) & ~missing
    finite = np.isfinite(decimals)
    per_unit = form.ticks_per_second * LONG_UNITS.get(form.unit, 1) / TICKS.get(form.unit, 1)
    scaled = np.where(finite, decimals, 0.0) * per_unit
    ticks = np.rint(np.clip(scaled, -9e18, 9e18)).astype(np.int64)
    return ticks, missing, unreadable | (~finite & ~missing)


def _as_ticks(whole: Int64Array, unit: str) -> Int64Array:
    """Return integers of a unit in ticks: seconds for long units, with what is out of range cut to it."""
    length = LONG_UNITS.get(unit, 1)
    return whole if length == 1 else np.clip(whole, -(2**62) // length, 2**62 // length) * length


def _some_decimals(texts: pa.Array) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, r"^\s*[-+]?[0-9]*\.[0-9]+\s*$")).as_py())


class TimeFormChanged(Exception):
    """A later block writes its times in another way than the first (decimals instead of integers, finer fractions).

    `changes` are the fields of the form that differ; the log must be read again with them.
    """

    def __init__(self, **changes: str) -> None:
        super().__init__(changes)
        self.changes = changes


def _text_ticks(
    values: pa.Array, form: TimeForm, missing: NDArray[np.bool_]
) -> tuple[Int64Array, NDArray[np.bool_], NDArray[np.bool_]]:
    texts = _texts(values)
    missing = missing | is_blank(texts).to_numpy(zero_copy_only=False)
    parsed = _formatted_ticks(texts, form) if form.kind == "format" else _iso_ticks(texts, form.resolution)
    unreadable = parsed.is_null().to_numpy(zero_copy_only=False) & ~missing
    return pc.fill_null(parsed, 0).to_numpy(zero_copy_only=False), missing, unreadable


def _iso_ticks(texts: pa.Array, resolution: str) -> pa.Array:
    """Read ISO texts; null where one is none.

    Arrow reads a block in which all are written in the same way; otherwise Python reads them one by one.

    Raises:
        TimeFormChanged: some have fractions below the resolution.
    """
    for zone in (None, "UTC"):
        parsed = cast_all(texts, pa.timestamp(resolution, tz=zone))
        if parsed is not None:
            return parsed.view(pa.int64())
    if resolution == "us" and pc.any(pc.match_substring_regex(texts, _FINER_THAN_MICROSECONDS)).as_py():
        raise TimeFormChanged(resolution="ns")
    step = 10**9 // TICKS[resolution]
    moments = (None if text is None else iso_nanoseconds(text) for text in texts.to_pylist())
    ticks = (None if moment is None else max(-(2**63), min(moment // step, 2**63 - 1)) for moment in moments)
    return pa.array(ticks, pa.int64())


def _formatted_ticks(texts: pa.Array, form: TimeForm) -> pa.Array:
    """Read texts of a format; null where one is not of it, or is no day of the calendar.

    Arrow is fast, but reads 31/02 as 3 March: its result is used only where it writes back the same text. Python reads
    the rest, each distinct text once.
    """
    assert form.format is not None
    ticks = pa.nulls(len(texts), pa.int64())
    if set(re.findall("%(.)", form.format)) <= set("YmdHMS"):
        moments = pc.strptime(texts, format=form.format, unit="s", error_is_null=True)
        same = pc.equal(pc.strftime(moments, format=form.format).cast(pa.large_string()), texts)
        ticks = pc.if_else(same, moments.view(pa.int64()), ticks)
    rest = pc.and_(ticks.is_null(), texts.is_valid())
    if not pc.any(rest).as_py():
        return ticks
    distinct = pc.dictionary_encode(texts.filter(rest))
    read = [_python_ticks(text, form.format, form.ticks_per_second) for text in distinct.dictionary.to_pylist()]
    return pc.replace_with_mask(ticks, rest, pa.array(read, pa.int64()).take(distinct.indices))


def _python_ticks(text: str, format: str, ticks_per_second: int) -> int | None:
    if any(char.isdigit() and not char.isascii() for char in text):  # Python would read digits of any script
        return None
    try:
        moment = datetime.datetime.strptime(text, format)
    except ValueError:
        return None
    return _microseconds(moment) * ticks_per_second // 10**6


_FINER_THAN_MICROSECONDS = r":[0-9]{2}[.,][0-9]{7}"


def _microseconds(moment: datetime.datetime) -> int:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return (moment - EPOCH) // datetime.timedelta(microseconds=1)


def _texts(values: pa.Array) -> pa.Array:
    return values.cast(pa.large_string())


def _without_blanks(texts: pa.Array) -> pa.Array:
    return texts.filter(pc.invert(is_blank(texts)))
