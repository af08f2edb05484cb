"""From raw columns to checked records: keys of users and items, times in ticks, actions as numbers.

Every record is either kept or dropped for a reason. A wrong record raises an error that names its line and the remedy,
unless the user allows bad records to be dropped; then they are counted by reason.
"""

from __future__ import annotations

import decimal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.feature_columns import Kind
from turbogr.data.prepare.feature_kinds import category_texts, guess_kind
from turbogr.data.prepare.id_keys import KeyedIds
from turbogr.data.prepare.source import DROPPING, Block, Columns, ReadOptions
from turbogr.data.prepare.text_casts import DECIMAL_COMMA, cast_each, comma_hint, is_blank, is_text
from turbogr.data.prepare.time_column import (
    REASONS,
    OddTimes,
    TimeForm,
    detect_form,
    explain,
    has_readable_time,
    parse_times,
)
from turbogr.data.times import iso_time
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, excerpt

_FIRST_INEXACT = float(2**53)  # 2**53 + 1 becomes 2**53 too
_EXACT_BELOW = {pa.float16(): 2**11, pa.float32(): 2**24}


class TextIdsFound(Exception):
    """Ids of `role` that looked like integers turn out to be text; read the input again with text ids."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.role = role


@dataclass(frozen=True)
class Records:
    """The kept records of a block and the account of the others."""

    users: KeyedIds
    items: KeyedIds
    ticks: Int64Array | None
    actions: dict[str, NDArray[np.float64]]
    features: dict[str, KeyedIds | NDArray[np.float64]]
    num_in: int
    dropped: Counter[str]
    progress: int
    odd_times: OddTimes


@dataclass(frozen=True)
class RecordParser:
    """Turns blocks into records. `kinds` maps "user" and "item" to "integer" or "text".

    `features` has the kind of every feature of events, and whether the user has named it.
    """

    columns: Columns
    options: ReadOptions
    kinds: dict[str, str]
    texts_may_be_numbers: bool
    hash_seed: int
    time_form: TimeForm | None
    features: Mapping[str, tuple[Kind, bool]] = field(default_factory=dict)

    def feature_kinds(self, block: Block) -> dict[str, tuple[Kind, bool]]:
        """Decide of which kind the features of events are, where the user has not said so."""
        return {
            feature.name: (
                feature.kind or guess_kind(feature.name, block.columns[feature.name], several=False),
                feature.kind is not None,
            )
            for feature in self.columns.features
        }

    def has_readable_time(self, block: Block) -> bool:
        """Whether the block holds a readable time, so that `detect_time_form` can decide on it."""
        return self.options.time_format is not None or has_readable_time(self._times(block, _Checks(block, drop=True)))

    def detect_time_form(self, block: Block) -> TimeForm:
        """Decide how the time column is written.

        Raises:
            UserError: it is not of a type that holds times, or its values contradict the options.
        """
        assert self.columns.time is not None
        values = self._times(block, _Checks(block, drop=True))
        try:
            return detect_form(values, self.columns.time, self.options.time_unit, self.options.time_format)
        except UserError as error:
            raise UserError(f"{block.where(0)}: {error}" if str(error).startswith("column") else str(error)) from None

    def _times(self, block: Block, checks: _Checks) -> pa.Array:
        """Return the time column as integers, float64, valid text or what else it is."""
        name = self.columns.time
        assert name is not None
        values = _decoded(block.columns[name])
        if is_text(values.type):
            return self._with_points(_valid_text(values, checks, name))
        if pa.types.is_decimal(values.type):
            try:
                return values.cast(pa.int64())
            except pa.ArrowInvalid:
                return values.cast(pa.float64())
        if values.type not in _EXACT_BELOW:
            return values
        numbers = values.cast(pa.float64())
        large = pc.and_(pc.is_finite(numbers), pc.greater_equal(pc.abs(numbers), _EXACT_BELOW[values.type]))
        if pc.any(large).as_py():
            raise UserError(
                f"{block.where(0)}: the time column {name!r} is of type {values.type}, which is too coarse for times "
                f"near {numbers.filter(large)[0].as_py():.0f}; write it as float64 or as integers"
            )
        return numbers

    def parse(self, block: Block) -> Records:
        """Check and convert a block.

        Raises:
            UserError: a record is wrong and bad records are not to be dropped.
            TextIdsFound, TimeFormChanged, KeyCollision: the input must be read again in another way.
        """
        checks = _Checks(block, self.options.drop_bad_rows)
        users = self._ids("user", self.columns.user, block, checks)
        items = self._ids("item", self.columns.item, block, checks)
        ticks = self._ticks(block, checks)
        numbers = {
            name: _numbers(block.columns[name], name, checks, self._with_points) for name in self.columns.numbers
        }
        derived = {
            name: np.where(np.isnan(numbers[rule.columns[0]]), np.nan, rule.keep(numbers))
            for name, rule in self.columns.derived.items()
        }
        features = {name: self._feature(name, block, checks) for name in self.features}
        keep = ~checks.bad
        dropped = Counter(block.dropped)
        for rule in self.columns.filters:
            out = keep & ~rule.keep(numbers)
            dropped[rule.reason] += int(out.sum())
            keep &= ~out
        # Last, because dropped records do not decide whether ids are integers or text.
        users = self._of_kind("user", self.columns.user, users, keep, checks)
        items = self._of_kind("item", self.columns.item, items, keep, checks)
        dropped += checks.dropped
        return Records(
            users=self._keyed(users, keep, counted=True),
            items=self._keyed(items, keep, counted=False),
            ticks=None if ticks is None else ticks[keep],
            actions={name: {**numbers, **derived}[name][keep] for name in self.columns.actions},
            features={
                name: values[keep] if isinstance(values, np.ndarray) else self._keyed(values, keep, counted=False)
                for name, values in features.items()
            },
            num_in=block.num_records + sum(block.dropped.values()),
            dropped=+dropped,
            progress=block.progress,
            odd_times=self._odd_times(ticks, keep, block),
        )

    def _feature(self, name: str, block: Block, checks: _Checks) -> Any:
        """Return the numbers of a feature, or its categories as an Arrow text array."""
        kind, named = self.features[name]
        if kind == "category":
            values = _decoded(block.columns[name])
            if pa.types.is_nested(values.type):
                raise UserError(f"{block.where(0)}: column {name!r} is of type {values.type}, not one value per event")
            return category_texts(_valid_text(values, checks, name) if is_text(values.type) else values)
        hint = "" if named else f"; if its values are categories, say --event-features {name}:category"
        return _numbers(block.columns[name], name, checks, self._with_points, hint)

    def _odd_times(self, ticks: Int64Array | None, keep: NDArray[np.bool_], block: Block) -> OddTimes:
        if ticks is None or self.time_form is None or self.columns.time is None:
            return OddTimes()
        kept, values, per_second = (
            np.flatnonzero(keep),
            block.columns[self.columns.time],
            self.time_form.ticks_per_second,
        )

        def say(k: int) -> str:
            record = int(kept[k])
            moment = iso_time(int(ticks[record]) // per_second)
            raw = _decoded(values)[record]
            text = _shown(raw.as_py() if is_text(raw.type) else _moment_text(raw))
            return f"{text} ({moment}) in {block.where(record)}"

        return OddTimes.of(ticks[kept], self.time_form, say)

    def _with_points(self, texts: pa.Array) -> pa.Array:
        """Return numbers with decimal commas, if the log has these, with points; others are left as they are."""
        if self.options.decimal != "comma":
            return texts
        return pc.replace_substring_regex(texts, DECIMAL_COMMA, r"\1.\2")

    def _keyed(self, ids: Any, keep: NDArray[np.bool_], counted: bool) -> KeyedIds:
        if isinstance(ids, np.ndarray):
            return KeyedIds.of_integers(ids[keep], counted)
        return KeyedIds.of_texts(ids.filter(pa.array(keep)), counted, self.hash_seed)

    def _ids(self, role: str, name: str, block: Block, checks: _Checks) -> Any:
        """Return int64 ids or an Arrow text array; bad records are flagged and hold any value."""
        values = _decoded(block.columns[name])
        if pa.types.is_decimal(values.type) and values.type.scale == 0:
            values = (
                values.cast(pa.large_string()) if self.kinds[role] == "text" else _fitting(values, role, name, checks)
            )
        missing = values.is_null().to_numpy(zero_copy_only=False)
        as_text = self.kinds[role] == "text"
        if pa.types.is_integer(values.type):
            checks.flag(missing, f"missing {role}", lambda k: f"the {role} (column {name!r}) is missing")
            return _decimal_texts(values) if as_text else _integers(values, role, name, checks)
        if not is_text(values.type):
            hint = " (pandas makes decimals of integers with gaps: .astype('Int64') fixes the column)"
            raise UserError(
                f"{block.where(0)}: the {role} column {name!r} is of type {values.type}; ids must be integers or text"
                + (hint if pa.types.is_floating(values.type) else ", so write it as one of them")
            )
        texts = _valid_text(values, checks, name)
        missing = missing | pc.fill_null(pc.equal(texts, ""), True).to_numpy(zero_copy_only=False)
        checks.flag(missing, f"missing {role}", lambda k: f"the {role} (column {name!r}) is missing")
        return texts

    def _of_kind(self, role: str, name: str, ids: Any, keep: NDArray[np.bool_], checks: _Checks) -> Any:
        """Return ids of the kind in `kinds`.

        Records with an integer beyond 64 bits are flagged, removed from `keep`, and hold any value.
        """
        if isinstance(ids, np.ndarray) or self.kinds[role] == "text" or not self.texts_may_be_numbers:
            return ids
        integers = _canonical_integers(ids.filter(pa.array(keep)))
        if integers is None:
            _flag_long_integers(ids, role, name, keep, checks)
            keep &= ~checks.bad
            integers = _canonical_integers(ids.filter(pa.array(keep)))
        if integers is None:
            raise TextIdsFound(role)
        out = np.zeros(len(ids), np.int64)
        out[keep] = integers
        return out

    def _ticks(self, block: Block, checks: _Checks) -> Int64Array | None:
        name, form = self.columns.time, self.time_form
        if name is None:
            return None
        assert form is not None
        values = self._times(block, checks)
        times = parse_times(values, form)
        for reason in np.unique(times.reasons[times.reasons > 0]).tolist():
            checks.flag(
                times.reasons == reason,
                REASONS[reason],
                lambda k: explain(int(times.reasons[k]), _moment_text(values[k]), form, name),
            )
        return times.ticks


def _moment_text(value: Any) -> str:
    """Return a time as text, or as the number in the file for years outside 1 to 9999, which Python cannot write."""
    try:
        return str(value.as_py())
    except (OverflowError, ValueError):
        return f"{value.value} ({value.type})"


@dataclass
class _Checks:
    """Records of a block found bad so far; each is counted under its first reason."""

    block: Block
    drop: bool
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.bad = np.zeros(self.block.num_records, bool)

    def flag(self, mask: NDArray[np.bool_], reason: str, say: Callable[[int], str]) -> None:
        """Mark records as bad; unless they may be dropped, raise UserError for the first of them."""
        new = mask & ~self.bad
        count = int(new.sum())
        if not count:
            return
        if not self.drop:
            first = int(np.argmax(new))
            also = (
                f"({count - 1:,} more of the {len(mask):,} records read with it are like that; " if count > 1 else "("
            )
            raise UserError(f"{self.block.where(first)}: {say(first)} {DROPPING.replace('(', also)}")
        self.dropped[reason] += count
        self.bad |= new


def _decoded(values: pa.Array) -> pa.Array:
    """Return the values of a dictionary-encoded column themselves, and a column without a type as missing text."""
    if pa.types.is_null(values.type):
        return values.cast(pa.string())
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _valid_text(values: pa.Array, checks: _Checks, name: str) -> pa.Array:
    """Return UTF-8 text; values with other bytes are flagged and become empty.

    Readers of typed files do not check the encoding, so columns of type text are checked too.
    """
    values = values.cast(pa.large_binary())
    try:
        return values.cast(pa.large_string())
    except pa.ArrowInvalid:
        pass
    broken = np.zeros(len(values), bool)
    texts: list[str | None] = []
    for index, value in enumerate(values.to_pylist()):
        try:
            texts.append(None if value is None else value.decode("utf-8"))
        except UnicodeDecodeError:
            broken[index] = True
            texts.append("")
    checks.flag(
        broken,
        "broken UTF-8",
        lambda k: (
            f"column {name!r} holds bytes that are not UTF-8: {_bytes(values[k].as_py())}"
            f"{_as_latin1(values[k].as_py())}"
        ),
    )
    return pa.array(texts, pa.large_string())


def _integers(values: pa.Array, role: str, name: str, checks: _Checks) -> Int64Array:
    if pa.types.is_uint64(values.type):
        unsigned = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
        beyond = unsigned > np.uint64(2**63 - 1)
        checks.flag(beyond, "integer beyond 64 bits", lambda k: _too_long(role, name, str(unsigned[k])))
        return unsigned.astype(np.int64)  # type: ignore[no-any-return]
    return pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _fitting(values: pa.Array, role: str, name: str, checks: _Checks) -> pa.Array:
    """Return decimals without fractions as int64; those that do not fit are flagged and become null."""
    if values.type.precision >= len(str(2**63)):
        low, high = (pa.scalar(decimal.Decimal(bound), values.type) for bound in (-(2**63), 2**63 - 1))
        beyond = pc.fill_null(pc.or_(pc.less(values, low), pc.greater(values, high)), False)
        checks.flag(
            beyond.to_numpy(zero_copy_only=False),
            "integer beyond 64 bits",
            lambda k: _too_long(role, name, str(values[k].as_py())),
        )
        values = pc.if_else(beyond, pa.scalar(None, values.type), values)
    return values.cast(pa.int64())


def _decimal_texts(values: pa.Array) -> pa.Array:
    return pc.fill_null(values.cast(pa.large_string()), "")


def _canonical_integers(texts: pa.Array) -> Int64Array | None:
    """Return int64 values if every text writes a 64-bit integer in the one canonical way ("7", not "07" or "+7")."""
    try:
        values = texts.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        return None
    lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
    powers = np.array([10**k for k in range(1, 19)], np.uint64)
    magnitude = np.where(values < 0, (~values).view(np.uint64) + np.uint64(1), values.view(np.uint64))
    digits = np.searchsorted(powers, magnitude, side="right") + 1
    return values if bool((digits + (values < 0) == lengths).all()) else None


def _flag_long_integers(texts: pa.Array, role: str, name: str, good: NDArray[np.bool_], checks: _Checks) -> None:
    """Flag integers beyond 64 bits in a column of integers; a column with other `good` texts is text anyway."""
    integer = pc.fill_null(pc.match_substring_regex(texts, r"^-?(0|[1-9][0-9]*)$"), False).to_numpy(
        zero_copy_only=False
    )
    if not integer[good].all():
        return
    lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    beyond = good & (lengths > 20)  # a sign and 19 digits at most; Python refuses to read thousands of them
    for index in np.flatnonzero(good & (lengths >= 19) & ~beyond).tolist():
        beyond[index] = not -(2**63) <= int(texts[index].as_py()) < 2**63
    checks.flag(beyond, "integer beyond 64 bits", lambda k: _too_long(role, name, texts[k].as_py()))


def _too_long(role: str, name: str, text: str) -> str:
    if len(text) > 40:
        text = f"{text[:20]}... of {len(text):,} characters"
    return f"the {role} {text} (column {name!r}) does not fit 64 bits; --text-ids treats ids as text"


def _numbers(
    values: pa.Array, name: str, checks: _Checks, with_points: Callable[[pa.Array], pa.Array], hint: str = ""
) -> NDArray[np.float64]:
    """Return a number column as float64, NaN where it is missing; text that is no number is flagged."""
    values = _decoded(values)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    unreadable = np.zeros(len(values), bool)
    if is_text(values.type):
        texts = _valid_text(values, checks, name)
        filled = pc.if_else(is_blank(texts), pa.scalar("nan", pa.large_string()), with_points(texts))
        try:
            values = filled.cast(pa.float64())
        except pa.ArrowInvalid:
            values, unreadable = cast_each(filled, pa.float64())
    elif not (
        pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_decimal(values.type)
    ):
        raise UserError(f"{checks.block.where(0)}: column {name!r} is of type {values.type}, not numbers")
    numbers = pc.fill_null(values.cast(pa.float64(), safe=False), float("nan")).to_numpy(zero_copy_only=False)
    original = checks.block.columns[name]
    checks.flag(
        unreadable | np.isinf(numbers) | (np.abs(numbers) >= _FIRST_INEXACT),
        "unreadable number",
        lambda k: (
            f"{_shown(original[k].as_py())} in column {name!r} is not a number that can be kept"
            f"{comma_hint(_text(original[k].as_py())) or hint}"
        ),
    )
    return numbers  # type: ignore[no-any-return]


def _shown(value: object) -> str:
    return excerpt(_text(value))


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _as_latin1(value: bytes) -> str:
    """Say what bytes are in the most common encoding besides UTF-8, if it makes them letters; else ""."""
    text = value.decode("cp1252", "replace")
    strange = [char for char in text if not char.isascii()]
    if not all(char.isalpha() for char in strange):
        return ""
    return f", which is {excerpt(text)} in Latin-1; --encoding=latin-1 reads a delimited file as that"


def _bytes(value: bytes) -> str:
    return repr(value) if len(value) <= 60 else f"{value[:30]!r}... of {len(value):,} bytes"
