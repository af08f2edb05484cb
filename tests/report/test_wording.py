from __future__ import annotations

import math

import pytest

from turbogr.report import wording


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.4, "0.4 s"),
        (59.6, "1 min"),
        (151, "2 min 31 s"),
        (3600, "1 h"),
        (90061, "1 d 1 h"),
        (math.nan, "—"),
        (None, "—"),
    ],
)
def test_durations(seconds, written):
    assert wording.duration(seconds) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "same time"), (1, "1 s"), (100, "2 min"), (7300, "2 hours"), (86400, "1 day"), (40 * 86400, "1 month"),
     (800 * 86400, "2 years"), (-60, "1 min"), ("x", "—")],
)  # fmt: skip
def test_gaps(seconds, written):
    assert wording.gap(seconds) == written


@pytest.mark.parametrize(
    ("function", "value", "written"),
    [
        (wording.count, 6040, "6,040"),
        (wording.count, True, "—"),
        (wording.share, 0.30971, "31.0 %"),
        (wording.share, 0.00123, "0.12 %"),
        (wording.share, 0, "0.0 %"),
        (wording.times, 6.07, "6.1×"),
        (wording.times, 0.783, "0.78×"),
        (wording.times, 123.4, "123×"),
        (wording.size, 25_274_793_984, "23.5 GiB"),
        (wording.size, 12, "12 B"),
        (wording.size, 5 * 1024**4, "5.0 TiB"),
        (wording.moment, 1_741_780_000, "12 Mar 2025, 11:46 UTC"),
        (wording.moment, 1e300, "—"),
        (wording.moment, math.nan, "—"),
        (wording.date, "2025-03-12T13:58:11+01:00", "12 Mar 2025, 12:58 UTC"),
        (wording.date, "2025-03-12T13:58:11Z", "12 Mar 2025, 13:58 UTC"),
        (wording.date, "soon", "soon"),
        (wording.date, None, "—"),
        (wording.sentence, "split; ranked", "Split; ranked."),
        (wording.sentence, None, ""),
    ],
)
def test_words(function, value, written):
    assert function(value) == written
