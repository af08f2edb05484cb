from __future__ import annotations

import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.histories import seconds_of
from turbogr.data.split import parse_rule
from turbogr.data.times import END_OF_TIME, iso_nanoseconds, iso_time, parse_time
from turbogr.errors import UserError

MOMENT = datetime.datetime(2022, 5, 1, 12, 30, 15, tzinfo=datetime.timezone.utc)
SECONDS = int(MOMENT.timestamp())

ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        (str(SECONDS), SECONDS),
        (f" {SECONDS}.75 ", SECONDS),
        ("20220501", 20220501),
        ("1970-01-02", 86400),
        ("2022-05-01T12:30:15Z", SECONDS),
        ("2022-05-01 12:30:15.999", SECONDS),
        ("2022-05-01T14:30:15+02:00", SECONDS),
        ("20220501T070015-0530", SECONDS),
        ("1969-12-31T23:59:59.5", -1),
    ],
)
def test_a_time_is_seconds_or_iso_text(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", ".", ".5", "-5", "1e9", "noon", "2022-05", "2022-W17-7", "2022-02-29", "9" * 5000, "٣"]
)
def test_other_text_is_no_time(text: str) -> None:
    assert parse_time(text) is None
    with pytest.raises(UserError, match="cannot read"):
        parse_rule(f"time:{text}")


@given(st.datetimes(datetime.datetime(1970, 1, 2), datetime.datetime(2199, 12, 30), timezones=st.none() | ZONES))
def test_iso_text_reads_as_python_reads_it(moment: datetime.datetime) -> None:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)
    microseconds = (aware - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)) // datetime.timedelta(
        microseconds=1
    )
    for separator in "T ":
        assert iso_nanoseconds(moment.isoformat(separator)) == microseconds * 1000
    assert seconds_of(moment, "at") == seconds_of(moment.isoformat(), "at") == microseconds // 10**6
    assert parse_rule(f"time:{moment.isoformat()}") == f"time:{microseconds // 10**6}"


@given(st.integers(0, END_OF_TIME - 1))
def test_iso_time_can_be_read_back(seconds: int) -> None:
    assert parse_time(iso_time(seconds)) == seconds


def test_a_time_of_the_caller_has_a_range() -> None:
    for good in (SECONDS, float(SECONDS), str(SECONDS), MOMENT, np.datetime64(SECONDS, "s"), np.int64(SECONDS)):
        assert seconds_of(good, "at") == SECONDS
    with pytest.raises(UserError, match="at: '1651408215000' lies before 1970 or after 2200; give seconds"):
        seconds_of(f"{SECONDS}000", "at")
    with pytest.raises(UserError, match="at: cannot read 'noon' as a time"):
        seconds_of("noon", "at")
    for wrong in (None, True, float("nan"), np.datetime64("NaT")):
        with pytest.raises(UserError, match="cannot read"):
            seconds_of(wrong, "at")
