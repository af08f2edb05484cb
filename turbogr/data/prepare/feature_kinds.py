"""Which kind of feature a column holds: as the user says (`tab:category`), or as its first values look.

Text is a category, and several of them where it is separated by | or commas. Numbers with fractions are numbers. Whole
numbers are categories where they are called an id or few of them differ, else numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.feature_columns import FeatureInfo, Kind
from turbogr.data.prepare.text_casts import cast_all, is_blank, is_text
from turbogr.errors import UserError, did_you_mean

KINDS = ("category", "categories", "number")
_FEW_VALUES = 100
_LIST = r"^[\w'&.\- ]+([,|][\w'&.\- ]+)+$"
assert set(KINDS) < set(get_args(Kind))


@dataclass(frozen=True)
class NamedFeature:
    """A column that is to become a feature; `kind` None: seen from its first values."""

    name: str
    kind: Kind | None = None

    def __str__(self) -> str:
        return self.name if self.kind is None else f"{self.name}:{self.kind}"


def parse_feature(text: str, option: str, *, several: bool = True) -> NamedFeature:
    """Read "tab" or "tab:category".

    Raises:
        UserError: the kind is not one, or `categories` of what has a single value (not `several`).
    """
    name, colon, kind = text.strip().rpartition(":")
    known = KINDS if several else ("category", "number")
    if colon and kind in known:
        return NamedFeature(name, kind)  # type: ignore[arg-type]
    if colon and (kind in KINDS or (name and did_you_mean(kind, known))):
        raise UserError(
            f"{option}: {text!r} asks for the kind {kind!r}; use {', '.join(known)}.{did_you_mean(kind, known)}"
        )
    return NamedFeature(text.strip())


def guess_kind(name: str, values: pa.Array, *, several: bool) -> Kind:
    """Return the kind of a column from some of its values; `several`: a row may have several categories."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return "categories"
    values = plain_values(values)
    if pa.types.is_boolean(values.type):
        return "category"
    if is_text(values.type):
        texts = decoded_texts(values)
        given = texts.filter(pc.invert(is_blank(texts)))
        numbers = cast_all(given, pa.float64())
        if numbers is None:
            lists = given.filter(pc.match_substring_regex(given, "[,|]"))
            alike = several and len(lists) and pc.all(pc.match_substring_regex(lists, _LIST)).as_py()
            return "categories" if alike else "category"
    else:
        numbers = values.drop_null().cast(pa.float64(), safe=False)
    found = numbers.to_numpy(zero_copy_only=False)
    found = found[np.isfinite(found)]
    if (found != np.rint(found)).any():
        return "number"
    few = len(np.unique(found)) <= _FEW_VALUES
    return "category" if few or re.search(r"(^|[_\W])ids?$|[a-z]Id$", name) else "number"


def plain_values(values: pa.Array) -> pa.Array:
    """Return the values of a dictionary-encoded column themselves, and a column without a type as missing text."""
    if pa.types.is_null(values.type):
        return values.cast(pa.string())
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def decoded_texts(values: pa.Array) -> pa.Array:
    """Return text of any type as UTF-8; what is not is read as Latin-1."""
    try:
        return values.cast(pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        raw = values.cast(pa.large_binary()).to_pylist()
        return pa.array([None if value is None else _decode(value) for value in raw], pa.large_string())


def _decode(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("cp1252", "replace")


def category_texts(values: pa.Array) -> pa.Array:
    """Return the categories of a column as text, "" where none is given; whole numbers are written without a point."""
    values = plain_values(values)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        values = values.cast(pa.float64(), safe=False)
        numbers = values.to_numpy(zero_copy_only=False)
        missing = np.isnan(numbers)
        whole = np.where(missing, 0, numbers)
        if (whole == np.rint(whole)).all() and (np.abs(whole) < 2.0**53).all():
            values = pa.array(whole.astype(np.int64), mask=missing)
        else:
            values = pa.array(numbers, mask=missing)
    texts = decoded_texts(values) if is_text(values.type) else values.cast(pa.large_string())
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(is_blank(texts), pa.scalar("", pa.large_string()), texts)


class NumberSummary:
    """What the manifest says of a column of numbers, from all of its values, block by block."""

    def __init__(self) -> None:
        self.count = self.missing = 0
        self.low, self.high, self.whole = np.inf, -np.inf, True
        self._sums, self._log_sums = np.zeros(3), np.zeros(2)

    def add(self, values: np.ndarray) -> None:
        """Count the values [n], NaN where none is given."""
        present = np.asarray(values, np.float64)
        present = present[~np.isnan(present)]
        self.missing += len(values) - len(present)
        if not len(present):
            return
        self.count += len(present)
        self.low, self.high = min(self.low, float(present.min())), max(self.high, float(present.max()))
        self.whole = self.whole and bool((present == np.rint(present)).all())
        self._sums += [present.sum(), (present**2).sum(), (present**3).sum()]
        if self.low >= 0:
            logs = np.log1p(present)
            self._log_sums += [logs.sum(), (logs**2).sum()]

    @property
    def constant(self) -> bool:
        """Whether there is at most one value, without counting missing ones."""
        return self.count == 0 or self.low == self.high

    @property
    def binary(self) -> bool:
        return self.count > 0 and self.whole and self.low >= 0 and self.high <= 1

    def info(self, *, action: bool = False) -> FeatureInfo:
        """Return the entry of the manifest; of an `action` also whether it is binary, and never in logarithms."""
        count = max(self.count, 1)
        mean, square, cube = self._sums / count
        variance = max(square - mean**2, 0.0)
        skew = (cube - 3 * mean * square + 2 * mean**3) / variance**1.5 if variance > 0 else 0.0
        kind: Kind = "binary" if action and self.binary else "number"
        log = not action and self.low >= 0 and skew > 2
        if log:
            mean, square = self._log_sums / count
            variance = max(square - mean**2, 0.0)
        low, high = (self.low, self.high) if self.count else (0.0, 0.0)
        return FeatureInfo(kind, 1, self.missing, low, high, float(mean), float(variance**0.5), bool(log))
