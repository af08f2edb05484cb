from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest

from turbogr.data.prepare.time_column import REASONS, detect_form, explain, parse_times, read_unit
from turbogr.errors import UserError

MOMENT = datetime.datetime(2022, 5, 1, 12, 30, 15, tzinfo=datetime.timezone.utc)
SECONDS = int(MOMENT.timestamp())


def seconds(values: pa.Array, name: str = "timestamp", unit: str = "auto", format: str | None = None) -> list[int]:
    form = detect_form(values, name, unit, format)
    times = parse_times(values, form)
    assert not times.reasons.any(), [REASONS[reason] for reason in times.reasons]
    return [int(tick) for tick in times.ticks // form.ticks_per_second]


def reasons(values: pa.Array, first: pa.Array | None = None, **options: str) -> list[str]:
    form = detect_form(
        values if first is None else first, "timestamp", options.get("unit", "auto"), options.get("format")
    )
    return [REASONS[reason] for reason in parse_times(values, form).reasons]


@pytest.mark.parametrize("factor", [1, 10**3, 10**6, 10**9])
@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.string(), pa.large_string()])
def test_the_unit_of_integers_is_seen_from_their_size(factor: int, kind: pa.DataType) -> None:
    values = pa.array([SECONDS * factor, (SECONDS + 5) * factor]).cast(kind)
    assert seconds(values) == [SECONDS, SECONDS + 5]


def test_small_numbers_are_seconds() -> None:
    assert seconds(pa.array([0, 1, 2, 1000])) == [0, 1, 2, 1000]


def test_a_name_or_an_option_decides_the_unit() -> None:
    assert seconds(pa.array([5000, 7000]), name="time_ms") == [5, 7]
    assert seconds(pa.array([5000, 7000]), unit="ms") == [5, 7]
    assert seconds(pa.array([5.0, 7.0]), unit="s") == [5, 7]


@pytest.mark.parametrize(
    ("unit", "length"), [("min", 60), ("minutes", 60), ("h", 3600), ("Hours", 3600), ("d", 86400), ("day", 86400)]
)
@pytest.mark.parametrize("kind", [pa.int32(), pa.float64(), pa.string()])
def test_long_units(kind: pa.DataType, unit: str, length: int) -> None:
    values = pa.array([3, 19_000]).cast(kind)
    assert seconds(values, unit=read_unit(unit)) == [3 * length, 19_000 * length]


def test_parts_of_a_long_unit() -> None:
    assert seconds(pa.array([0.5, 19_000.25]), unit="d") == [43_200, 19_000 * 86400 + 21_600]
    assert seconds(pa.array(["0.5", "2"]), unit="min") == [30, 120]
    values, form = pa.array([1.0, 1.0000001]), detect_form(pa.array([1.0]), "t", "h", None)
    assert np.diff(parse_times(values, form).ticks).tolist() == [360]  # microseconds


def test_a_long_unit_of_far_too_large_numbers() -> None:
    assert reasons(pa.array([2**62, -(2**62), 5]), unit="d") == [REASONS[4], REASONS[3], ""]


def test_a_long_unit_in_the_name_counts_where_it_fits() -> None:
    assert seconds(pa.array([19_000, 19_001]), name="time_days") == [19_000 * 86400, 19_001 * 86400]
    assert seconds(pa.array([5, 7]), name="time_days") == [5, 7]
    assert seconds(pa.array([SECONDS, SECONDS + 1]), name="time_days") == [SECONDS, SECONDS + 1]


@pytest.mark.parametrize(("text", "words"), [("m", "'min' or 'ms'"), ("dayz", "'day'"), ("weeks", "auto, s, ms")])
def test_an_unknown_unit(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_unit(text)


def test_seconds_among_milliseconds_name_both() -> None:
    form = detect_form(pa.array([SECONDS, SECONDS]), "timestamp", "auto", None)
    assert "but is 2022-05-01 in 'ms': the column mixes units" in explain(4, str(SECONDS * 1000), form, "timestamp")
    form = detect_form(pa.array([SECONDS * 1000] * 3), "timestamp", "auto", None)
    assert "but is 2022-05-01 in 's': the column mixes units" in explain(5, str(SECONDS), form, "timestamp")


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.string()])
@pytest.mark.parametrize(
    ("said", "factor", "meant"), [("ms", 1, "s"), ("us", 1000, "ms"), ("ns", 1, "s"), ("ns", 10**6, "us")]
)
def test_a_unit_in_the_name_that_does_not_fit_the_times(kind: pa.DataType, said: str, factor: int, meant: str) -> None:
    values = pa.array([SECONDS * factor, (SECONDS + 5) * factor]).cast(kind)
    with pytest.raises(UserError, match=rf"1970-01-\d\d .*but 2022-05-01 in '{meant}'; say --time-unit {meant} or"):
        detect_form(values, f"time_{said}", "auto", None)
    assert seconds(values, name=f"time_{said}", unit=meant) == [SECONDS, SECONDS + 5]
    assert max(seconds(values, name=f"time_{said}", unit=said)) < 30 * 86400


def test_one_time_that_does_not_fit_the_unit_in_the_name() -> None:
    values = pa.array([SECONDS * 1000, SECONDS * 1000, SECONDS])
    times = parse_times(values, detect_form(values, "time_ms", "auto", None))
    assert [REASONS[reason] for reason in times.reasons] == ["", "", "time of another unit"]


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.float64(), pa.string()])
def test_numbers_like_20220501_are_days(kind: pa.DataType) -> None:
    days = [20220501, 19700101, 20240229, 21991231]
    midnights = [
        datetime.datetime.strptime(str(day), "%Y%m%d").replace(tzinfo=datetime.timezone.utc).timestamp() for day in days
    ]
    for name in ("date", "time_ms"):
        assert seconds(pa.array(days).cast(kind), name=name) == midnights
    assert seconds(pa.array(days).cast(kind), unit="s") == days


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_numbers_like_20220501123015_are_times_of_a_day(kind: pa.DataType) -> None:
    values = pa.array([20220501123015, 20220501123020]).cast(kind)
    assert seconds(values) == [SECONDS, SECONDS + 5]
    assert reasons(pa.array(["20220501250000", "7"]), first=values) == ["unreadable time"] * 2


def test_days_outside_the_calendar() -> None:
    first = pa.array([20220501, 20220502])
    wrong = pa.array(["20220431", "20220500", "20221301", "20220501.5", "19691231", "-20220501", "7", "1650000000", ""])
    assert reasons(wrong, first=first) == ["unreadable time"] * 8 + ["missing time"]
    assert reasons(pa.array([" 20220501", "20220502.0", "22000101"]), first=first) == [
        "",
        "",
        "time after the year 2200",
    ]


def test_seconds_among_which_some_could_be_days_stay_seconds() -> None:
    numbers = list(range(20220400, 20220600))
    assert seconds(pa.array(numbers)) == numbers


def test_decimals_keep_their_order_below_a_second() -> None:
    values = pa.array([SECONDS + 0.75, SECONDS + 0.5])
    form = detect_form(values, "timestamp", "auto", None)
    ticks = parse_times(values, form).ticks
    assert ticks[0] - ticks[1] == 250_000
    assert seconds(values.cast(pa.string())) == [SECONDS, SECONDS]


@pytest.mark.parametrize(
    "text",
    [
        "2022-05-01T12:30:15Z",
        "2022-05-01 12:30:15",
        "2022-05-01T12:30:15.500",
        "2022-05-01T12:30:15+00:00",
        "2022-05-01T14:30:15+02:00",
        "2022-05-01T14:30:15+0200",
        "2022-05-01T14:30:15.5+02",
        "2022-05-01T14:30:15 +02:00",
        "2022-05-01T07:00:15-0530",
        "2022-05-01T12:30:15,123456789",
        "2022-05-01T12:30:15.1234567891234Z",
        "20220501T123015Z",
    ],
)
def test_iso_text(text: str) -> None:
    assert seconds(pa.array([text])) == [SECONDS]
    assert seconds(pa.array([text, "2022-05-02"])) == [SECONDS, SECONDS - SECONDS % 86400 + 86400]


@pytest.mark.parametrize(
    "text",
    [
        "2022-W17-7",
        "2022-0501",
        "2022-05-01T12:30.5",
        "2022-05-01T24:00:00",
        "2022-05-01T12:30:60",
        "2022-05-01T12:30:15+24:00",
        "2022-05-01T12:30:15+02:60",
        "2022-02-29",
        "2022-05-01T",
        "\uff12\uff10\uff12\uff12-05-01",
    ],
)
def test_what_some_python_takes_for_iso_text(text: str) -> None:
    assert reasons(pa.array([text, "2022-05-01 "])) == ["unreadable time", ""]


def test_digits_of_other_scripts_are_no_numbers() -> None:
    wide = "\uff11\uff16\uff15\uff11\uff14\uff10\uff18\uff12\uff11\uff15"
    assert reasons(pa.array([wide, str(SECONDS)])) == ["unreadable time", ""]
    assert reasons(pa.array(["\uff12\uff10\uff12\uff12/05/01", "2022/05/01"]), format="%Y/%m/%d") == [
        "unreadable time",
        "",
    ]


def test_iso_text_keeps_its_order_below_a_microsecond() -> None:
    texts = pa.array(["2022-05-01T12:30:15.000000002Z", "2022-05-01T12:30:15.000000001"])
    ticks = parse_times(texts, detect_form(texts, "timestamp", "auto", None)).ticks
    assert ticks[0] - ticks[1] == 1
    far = pa.array(["2022-05-01T12:30:15.000000002Z", "9999-01-01", "0001-01-01"])
    assert reasons(far) == ["", "time after the year 2200", "negative time"]


def test_a_format() -> None:
    assert seconds(pa.array(["01/05/2022 12:30:15"]), format="%d/%m/%Y %H:%M:%S") == [SECONDS]
    assert reasons(pa.array(["2022"]), format="%d/%m/%Y") == ["unreadable time"]


@pytest.mark.parametrize("text", ["31/02/2022", "29/02/2021", "00/05/2022", "01/13/2022", "01/05/22", "01/05/2022 x"])
def test_a_day_that_is_not_in_the_calendar_is_no_time(text: str) -> None:
    texts = pa.array(["01/05/2022", text, None, "1/5/2022", text])
    day = ["", "unreadable time"]
    assert reasons(texts, format="%d/%m/%Y") == [*day, "missing time", *day]


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ("1/5/2022 12:30:15", "%d/%m/%Y %H:%M:%S"),
        ("2022-05-01 12:30:15", "%F %T"),
        ("1651408215.5 2022-05-01 12:30:15", "1651408215.5 %Y-%m-%d %H:%M:%S"),
        ("May 01 2022 12:30:15 PM", "%b %d %Y %I:%M:%S %p"),
        ("2022-05-01 14:30:15 +0200", "%Y-%m-%d %H:%M:%S %z"),
        ("100% 2022121 12:30:15", "100%% %Y%j %H:%M:%S"),
        ("01.05.2022 12:30:15.250", "%d.%m.%Y %H:%M:%S.%f"),
    ],
)
def test_formats(text: str, format: str) -> None:
    assert seconds(pa.array([text, text, text]), format=format) == [SECONDS] * 3


def test_a_format_with_fractions_keeps_the_order_below_a_second() -> None:
    texts = pa.array(["2022-05-01 12:30:15.75", "2022-05-01 12:30:15.5"])
    ticks = parse_times(texts, detect_form(texts, "timestamp", "auto", "%Y-%m-%d %H:%M:%S.%f")).ticks
    assert ticks[0] - ticks[1] == 250_000


@pytest.mark.parametrize("format", ["%Y-%Q", "%Y-%", "%d/%m/%Y %d", "%d/%m", "%%Y", "noon", "%G-%m-%d"])
def test_an_error_in_a_format_names_the_format(format: str) -> None:
    with pytest.raises(UserError, match=r"--time-format '.*write it like"):
        detect_form(pa.array(["2022-05-01"]), "timestamp", "auto", format)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_arrow_timestamps(unit: str) -> None:
    for zone in (None, "UTC", "Asia/Tokyo"):
        assert seconds(pa.array([MOMENT], pa.timestamp(unit, tz=zone))) == [SECONDS]
    assert seconds(pa.array([MOMENT.date()], pa.date32())) == [SECONDS - SECONDS % 86400]


def test_what_is_no_time_gets_a_reason() -> None:
    good = pa.array([str(SECONDS)])
    texts = ["", " ", "x", "-1", "nan", "inf", "99999999999999", "9" * 40, "1_000", "0x10", "1e9", None]
    expected = ["missing time"] * 2 + ["unreadable time", "negative time"] + ["unreadable time"] * 2
    expected += ["time after the year 2200"] * 2 + ["unreadable time"] * 3 + ["missing time"]
    assert reasons(pa.array(texts), first=good) == expected
    assert reasons(pa.array([1.0, float("nan"), float("inf"), -1.0, None])) == [
        "",
        "unreadable time",
        "unreadable time",
        "negative time",
        "missing time",
    ]
    assert reasons(pa.array(["2022-05-01", "1950-01-01", "2022-13-45", "9999-01-01"])) == [
        "",
        "negative time",
        "unreadable time",
        "time after the year 2200",
    ]
    assert reasons(pa.array([2**64 - 1, 5], pa.uint64()), unit="s") == ["time after the year 2200", ""]


def test_spaces_around_numbers_are_no_matter() -> None:
    assert seconds(pa.array([" 7", "8 "])) == [7, 8]
    assert reasons(pa.array(["0x10"]), first=pa.array(["7"])) == ["unreadable time"]


def test_a_time_in_another_unit_than_the_rest_is_refused() -> None:
    values = pa.array(np.append(np.full(9, SECONDS * 1000), SECONDS))
    assert reasons(values)[-1] == "time of another unit"
    assert reasons(values, unit="ms")[-1] == ""


def test_types_that_hold_no_time() -> None:
    with pytest.raises(UserError, match="is of type bool"):
        detect_form(pa.array([True]), "timestamp", "auto", None)
