"""A single time as text and as a number: reading what people write, and writing seconds as ISO 8601.

`turbogr.data.prepare.time_column` reads whole columns of them.
"""

from __future__ import annotations

import datetime
import re

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
END_OF_TIME = 7_258_118_400
"""2200-01-01 in seconds. Times before 1970 or from then on are nearly always a wrong unit."""

_SECONDS = re.compile(r"[0-9]{1,18}(\.[0-9]*)?")
_ISO = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{8})"
    r"(?:[T ](?P<time>[0-9]{2}(?::[0-9]{2}(?::[0-9]{2})?)?|[0-9]{4}(?:[0-9]{2})?)(?:[.,](?P<fraction>[0-9]+))?"
    r" ?(?P<zone>Z|[-+][0-9]{2}(?::?[0-9]{2})?)?)?"
)


def parse_time(text: str) -> int | None:
    """Read a time as whole seconds since 1970; None if the text is not a time.

    It is a number of seconds, or an ISO 8601 date or time, UTC unless it names a zone.
    """
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return int(text.partition(".")[0])
    nanoseconds = iso_nanoseconds(text)
    return None if nanoseconds is None else nanoseconds // 10**9


def iso_nanoseconds(text: str) -> int | None:
    """Read an ISO 8601 date or time, UTC unless it names a zone; digits below nanoseconds are cut off.

    `datetime.fromisoformat` reads more in Python 3.11 than in 3.10, so it is not used.
    """
    match = _ISO.fullmatch(text.strip())
    if match is None:
        return None
    day, clock, fraction = match["date"].replace("-", ""), (match["time"] or "").replace(":", ""), match["fraction"]
    zone = "" if match["zone"] in (None, "Z") else match["zone"].replace(":", "")
    offset = int(zone[1:3] or 0) * 3600 + int(zone[3:] or 0) * 60
    if (fraction and len(clock) < 6) or int(zone[1:3] or 0) > 23 or int(zone[3:] or 0) > 59:
        return None
    try:
        begin = datetime.datetime(int(day[:4]), int(day[4:6]), int(day[6:]), tzinfo=datetime.timezone.utc)
        begin = begin.replace(hour=int(clock[:2] or 0), minute=int(clock[2:4] or 0), second=int(clock[4:] or 0))
    except ValueError:
        return None
    seconds = (begin - EPOCH) // datetime.timedelta(seconds=1) - (-offset if zone.startswith("-") else offset)
    return seconds * 10**9 + int((fraction or "")[:9].ljust(9, "0"))


def iso_time(seconds: int) -> str:
    """Write seconds since 1970 as a date, with the time of day where it is not midnight (UTC)."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"
    return moment.strftime("%Y-%m-%d" if seconds % 86400 == 0 else "%Y-%m-%dT%H:%M:%SZ")
