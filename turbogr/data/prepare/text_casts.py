"""Text columns as numbers: all values in one cast, or one by one where some cannot be read."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_NUMBER = re.compile(r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$|^\s*[-+]?(nan|inf|infinity)\s*$", re.I | re.A)


DECIMAL_COMMA = r"^(\s*[-+]?\d*),(\d+(?:[eE][-+]?\d+)?\s*)$"
"""A number with a decimal comma, its parts as groups."""


def comma_hint(text: str) -> str:
    """Return the remedy if a text that cannot be read is a number with a decimal comma, else ""."""
    return "; if its comma is a decimal mark, say --decimal=comma" if re.match(DECIMAL_COMMA, text) else ""


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text, also text whose encoding was not checked (binary)."""
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
    )
    return any(check(kind) for check in checks)


def is_blank(texts: pa.Array) -> pa.Array:
    """Which texts are missing, empty or spaces only; no value of the result is null."""
    return pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True)


def cast_all(values: pa.Array, target: pa.DataType) -> pa.Array | None:
    """Cast all values, or return None where one cannot be cast; Arrow alone would read 0x10 as 16."""
    if is_text(values.type) and pc.any(pc.match_substring(values, "0x", ignore_case=True)).as_py():
        return None
    try:
        return values.cast(target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def cast_each(texts: pa.Array, target: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Cast one by one after `cast_all` failed; return the values and which of them are unreadable (null)."""
    read = int if pa.types.is_integer(target) else float
    values: list[Any] = []
    for text in texts.to_pylist():
        try:
            value = None if text is None or not _NUMBER.match(text) else read(text)
        except ValueError:
            value = None
        if isinstance(value, int):
            value = max(-(2**63), min(value, 2**63 - 1))  # such a time is refused as after the year 2200
        values.append(value)
    array = pa.array(values, target)
    return array, array.is_null().to_numpy(zero_copy_only=False)
