"""Numbers, sizes and times as text for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from turbogr.evaluation.metric_info import MetricInfo
from turbogr.plot import percent, si

MISSING = "—"

_UNITS = (
    ("year", 365.25 * 86400),
    ("month", 30.44 * 86400),
    ("day", 86400.0),
    ("hour", 3600.0),
    ("min", 60.0),
    ("s", 1.0),
)


def number(value: Any) -> float:
    """Return `value` as a float, NaN when it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


def column(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the numbers of one key of many records, NaN where there is none."""
    return [number(record.get(key)) for record in records]


def metric_value(metric: MetricInfo, value: float) -> str:
    """Write a metric's value for a headline: a share as a percentage, a number in four digits."""
    return share(value) if metric.format == "share" else f"{value:.4g}"


def metric_axis_format(metric: MetricInfo) -> Callable[[float], str]:
    """Return how an axis writes the values of a metric."""
    return percent if metric.format == "share" else si


def count(value: Any) -> str:
    """Write a whole number with thousands separators: 6040 is 6,040."""
    amount = number(value)
    return f"{amount:,.0f}" if math.isfinite(amount) else MISSING


def share(value: Any) -> str:
    """Write a share of one in three digits as a percentage: 0.30971 is 31.0 %, 0.00123 is 0.12 %."""
    amount = number(value) * 100
    if not math.isfinite(amount):
        return MISSING
    return f"{amount:.1f} %" if amount >= 1 or amount == 0 else f"{amount:.2g} %"


def times(value: float) -> str:
    """Write a factor: 6.07 is 6.1×, 123.4 is 123×; near and below 1 in two decimals, 1.04×."""
    if not math.isfinite(value):
        return MISSING
    return f"{value:.0f}×" if value >= 100 else f"{value:.1f}×" if value >= 1.15 else f"{value:.2f}×"


def size(value: Any) -> str:
    """Write a number of bytes in binary units: 25274793984 is 23.5 GiB."""
    amount = number(value)
    if not math.isfinite(amount):
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def duration(seconds: Any) -> str:
    """Write a length of time in its two largest units: 151 is 2 min 31 s."""
    amount = number(seconds)
    if not math.isfinite(amount):
        return MISSING
    if amount < 10:
        return f"{amount:.1f} s"
    whole = round(amount)
    days, whole = divmod(whole, 86400)
    hours, whole = divmod(whole, 3600)
    minutes, rest = divmod(whole, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def gap(seconds: Any) -> str:
    """Write the time between two events in one unit: 7300 is 2 hours; below a second, "same time"."""
    amount = abs(number(seconds))
    if not math.isfinite(amount):
        return MISSING
    for name, length in _UNITS:
        whole = math.floor(amount / length + 0.5) if amount >= length else 0
        if whole:
            plural = "s" if whole > 1 and name not in ("min", "s") else ""
            return f"{whole} {name}{plural}"
    return "same time"


def moment(seconds: Any) -> str:
    """Write seconds since 1970 as a date and time in UTC: 12 Mar 2025, 14:03 UTC."""
    amount = number(seconds)
    try:
        return _written(datetime.fromtimestamp(amount, tz=timezone.utc))
    except (ValueError, OverflowError, OSError):
        return MISSING


def date(text: Any) -> str:
    """Write an ISO 8601 time for people; other text is returned as it is."""
    try:
        # Python 3.10 does not read the Z of an ISO time
        parsed = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return str(text) if text else MISSING
    return _written(parsed.astimezone(timezone.utc) if parsed.tzinfo else parsed)


def sentence(text: Any) -> str:
    """Return `text` with a capital at the start and a full stop at the end; empty for nothing."""
    words = str(text).strip() if text else ""
    if not words:
        return ""
    return words[0].upper() + words[1:] + ("" if words[-1] in ".!?" else ".")


def _written(when: datetime) -> str:
    zone = " UTC" if when.tzinfo else ""
    return f"{when.day} {when:%b %Y, %H:%M}{zone}"
