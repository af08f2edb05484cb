from __future__ import annotations

import json
import math
import re
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.plot import (
    Axis,
    Mark,
    Series,
    bar_chart,
    grouped_bar_chart,
    histogram,
    line_chart,
    percent,
    scatter_chart,
    si,
    svg,
)
from turbogr.plot.scales import Scale, log_ticks, shorten, text_width, thin_labels, ticks

SPACE = "{http://www.w3.org/2000/svg}"
numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)
names = st.text(max_size=20)


def parse(chart: str) -> ElementTree.Element:
    """Parse as XML, and check that nothing is drawn outside the picture or at a place that is no number."""
    root = ElementTree.fromstring(chart)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for node in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            if name in node.attrib:
                assert -1 <= float(node.attrib[name]) <= width + 1, ElementTree.tostring(node)
        for name in ("y", "y1", "y2", "cy"):
            if name in node.attrib:
                assert -1 <= float(node.attrib[name]) <= height + 1, ElementTree.tostring(node)
        for name in ("width", "height"):
            assert float(node.attrib.get(name, 1)) >= 0
        for x, y in re.findall(r"[ML](\S+) ([^LMZ]+)", node.attrib.get("d", "")):
            assert -1 <= float(x) <= width + 1
            assert -1 <= float(y) <= height + 1
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SPACE}text")]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (1, "1"), (999, "999"), (1000, "1k"), (21_000, "21k"), (999_999, "1M"), (1_234_567, "1.235M"),
        (3.2e9, "3.2G"), (0.1104, "0.1104"), (0.05, "0.05"), (-2500, "−2.5k"), (1e-7, "1e-7".replace("-", "−")),
    ],
)  # fmt: skip
def test_numbers_are_short(value, written):
    assert si(value) == written


def test_shares_are_per_cent():
    assert percent(0.3097) == "30.97 %"
    assert percent(1.0) == "100 %"


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 9))
def test_ticks_are_round_ascending_and_inside(low, span, count):
    high = low + span
    if not high - low > 1e-6 * max(abs(low), 1e-12):
        return
    found = ticks(low, high, count)
    assert found == sorted(set(found))
    assert len(found) <= 2.5 * count + 2
    step = found[1] - found[0] if len(found) > 1 else 1
    assert all(low - 1e-6 * step <= tick <= high + 1e-6 * step for tick in found)
    if len(found) > 1 and step > 1e-5 * max(abs(low), abs(high)):
        digits = f"{step:.6e}"
        assert digits[0] in "125" or digits.startswith(("9.99", "4.99", "1.99")), step


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e12), st.integers(2, 8))
def test_log_ticks_are_ascending_and_inside(low, factor, count):
    found = log_ticks(low, low * factor, count)
    assert found == sorted(set(found))
    assert all(low * 0.999 <= tick <= low * factor * 1.001 for tick in found)
    if factor > 20:
        assert len(found) >= 2


@given(st.lists(numbers, max_size=20), st.booleans(), st.booleans())
def test_a_scale_holds_every_drawable_value(values, log, zero):
    scale = Scale.fit(values, Axis(log=log, zero=zero), 10, 210, pad=0.05)
    for value in values:
        if scale.drawable(value):
            assert 10 - 1e-6 <= scale(value) <= 210 + 1e-6


def test_labels_that_would_touch_are_dropped():
    assert thin_labels([0, 5, 60], ["aaaa", "bbbb", "cccc"], 11) == [0, 2]
    assert shorten("short", 11, 500) == "short"
    cut = shorten("a very long name indeed", 11, 60)
    assert cut.endswith("…")
    assert text_width(cut, 11) <= 60


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(names, st.lists(st.tuples(numbers, numbers), max_size=8)), max_size=4),
    st.booleans(),
    st.booleans(),
    names,
)
def test_any_lines_become_valid_svg(content, x_log, y_log, title):
    series = [Series(name, [x for x, _ in points], [y for _, y in points]) for name, points in content]
    axes = {"x": Axis(title, log=x_log), "y": Axis(title, log=y_log)}
    parse(line_chart(series, title=title, **axes))
    parse(scatter_chart(series, title=title, **axes, reference=Series(title, [1, 2], [1, 2])))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, numbers, max_size=6), names)
def test_any_bars_become_valid_svg(values, title):
    parse(bar_chart(values, title=title))
    parse(bar_chart(values, title=title, axis=Axis(log=True)))
    groups = [str(place) for place in range(3)]
    parse(grouped_bar_chart(groups, {name: [value, 1.0, -2.0] for name, value in values.items()}, title=title))


def test_bars_are_as_long_as_their_values():
    root = parse(bar_chart({"a": 10.0, "b": 5.0, "c": 0.0}, title="bars"))
    lengths = [float(node.attrib["width"]) for node in root.iter(f"{SPACE}rect") if "f0" in node.attrib["class"]]
    assert lengths[1] == pytest.approx(lengths[0] / 2, abs=0.02)
    assert lengths[2] == 0
    assert {"10", "5", "0"} <= set(texts(root))


def test_whiskers_reach_from_value_minus_to_value_plus_the_error():
    drawn = bar_chart({"a": 100.0, "b": 50.0, "c": 25.0}, title="t", errors=[10.0, math.nan, 50.0])
    bars = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawn)]
    left, width = bars[0]
    lines = [tuple(map(float, ends)) for ends in re.findall(r'x1="([\d.]+)" x2="([\d.]+)"[^>]*class="whisker"', drawn)]
    spans = [(low, high) for low, high in lines if low != high]
    assert len(spans) == 2, "none without an error"
    assert spans[0] == pytest.approx((left + 0.9 * width, left + 1.1 * width), abs=0.1)
    assert spans[1] == pytest.approx((left, left + 0.75 * width), abs=0.1), "it ends at the axis"


def test_long_names_stand_above_their_bars_in_full():
    name = "a name that needs more than its share of the width"
    narrow = bar_chart({name: 1.0, "b": 2.0}, title="t", width=346)
    assert f">{name}</text>" in narrow and "…" not in narrow
    assert 'text-anchor="end"' in bar_chart({"short": 1.0, "b": 2.0}, title="t", width=346)


def test_a_bar_that_was_not_measured_says_so():
    assert "not measured" in texts(parse(bar_chart({"a": 1.0, "b": math.nan}, title="bars")))


def test_grouped_bars_stand_at_their_heights_and_have_a_legend():
    root = parse(grouped_bar_chart(["x", "y"], {"one": [1.0, 2.0], "two": [4.0, math.nan]}, title="t"))
    bars = [node for node in root.iter(f"{SPACE}rect") if node.find(f"{SPACE}title") is not None]
    heights = {node.find(f"{SPACE}title").text: float(node.attrib["height"]) for node in bars}
    assert set(heights) == {"x, one: 1", "x, two: 4", "y, one: 2"}
    assert heights["x, two: 4"] == pytest.approx(4 * heights["x, one: 1"], abs=0.05)
    assert {"one", "two", "x", "y"} <= set(texts(root))


def test_histogram_bins_keep_their_counts():
    root = parse(histogram([0, 1, 2, 4], [3, 0, 6], title="h", marks=[Mark(1.5, 0, "median")]))
    bars = [node for node in root.iter(f"{SPACE}rect") if node.find(f"{SPACE}title") is not None]
    assert [node.find(f"{SPACE}title").text for node in bars] == ["0 to 1: 3", "1 to 2: 0", "2 to 4: 6"]
    heights = [float(node.attrib["height"]) for node in bars]
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.05)
    assert heights[1] == 0
    assert "median" in texts(root)
    with pytest.raises(ValueError, match="2 bins need 3 edges"):
        histogram([0, 1], [3, 4], title="h")


def test_a_line_breaks_where_a_value_cannot_be_drawn():
    root = parse(line_chart([Series("a", range(5), [1, 2, math.nan, 3, 4])], title="t"))
    assert len([node for node in root.iter(f"{SPACE}path") if "l0" in node.attrib["class"]]) == 2
    root = parse(line_chart([Series("a", range(1, 6), [1, 2, 0, 3, 4])], title="t", y=Axis(log=True)))
    assert len([node for node in root.iter(f"{SPACE}path") if "l0" in node.attrib["class"]]) == 2


def test_a_spread_is_drawn_as_a_band():
    chart = line_chart([Series("a", [1, 2, 3], [1, 2, 3], [0, 1, 2], [2, 3, 4])], title="t")
    assert any(node.attrib.get("fill-opacity") for node in parse(chart).iter(f"{SPACE}path"))
    with pytest.raises(ValueError, match="both low and high"):
        Series("a", [1], [1], low=[0])
    with pytest.raises(ValueError, match="1 x values but a column of 2"):
        Series("a", [1], [1, 2])


def test_hover_tells_every_series_at_a_place():
    chart = line_chart(
        [Series("a", [1, 2], [10, 20]), Series("b", [2, 3], [5, 6])],
        title="t",
        x=Axis("step"),
        marks=[Mark(2, 20, "!")],
    )
    hover = json.loads(parse(chart).attrib["data-hover"])
    assert [(heading, [text for _, _, text in entries]) for _, heading, entries in hover["points"]] == [
        ("step 1", ["a: 10"]),
        ("step 2", ["a: 20", "b: 5"]),
        ("step 3", ["b: 6"]),
    ]


def test_hover_stays_small():
    chart = line_chart([Series("a", range(10_000), range(10_000))], title="t")
    assert len(json.loads(parse(chart).attrib["data-hover"])["points"]) <= 250


def test_nothing_to_draw_is_said():
    for chart in (
        line_chart([], title="t"),
        line_chart([Series("a", [1], [math.nan])], title="t"),
        scatter_chart([], title="t"),
        bar_chart({}, title="t"),
        grouped_bar_chart([], {}, title="t"),
        histogram([0.0], [], title="t"),
    ):
        assert "nothing to draw yet" in texts(parse(chart))


def test_charts_are_standalone_and_named_for_screen_readers():
    root = parse(line_chart([Series("loss", [1, 2], [4, 3])], title="Training loss"))
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "Training loss: loss from 4 to 3"
    assert root.find(f"{SPACE}title").text == "Training loss"
    assert "prefers-color-scheme:dark" in root.find(f"{SPACE}style").text
    assert "url(" not in ElementTree.tostring(root, encoding="unicode")


def test_hostile_text_stays_text():
    evil = "</style><script>alert(1)</script>\x00\ud800"
    for chart in (
        line_chart([Series(evil, [1, 2], [1, 2]), Series("b", [1], [1])], title=evil, x=Axis(evil), y=Axis(evil)),
        bar_chart({evil: 1.0}, title=evil),
        grouped_bar_chart([evil], {evil: [1.0], "b": [2.0]}, title=evil, x_label=evil),
        scatter_chart([Series(evil, [1, 2], [1, 2])], title=evil, reference=Series(evil, [1, 2], [1, 2])),
        histogram([0, 1], [1], title=evil, names=[evil], marks=[Mark(0.5, 0, evil)]),
    ):
        assert "<script" not in chart
        parse(chart)


def _linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((float(_linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("palette", "tones"), [(svg.LIGHT, svg.LIGHT_TONES), (svg.DARK, svg.DARK_TONES)])
def test_colours_stand_out_from_the_paper(palette, tones):
    assert all(_contrast(colour, tones["paper"]) >= 3 for colour in palette)
    assert _contrast(tones["ink"], tones["paper"]) >= 7
    assert _contrast(tones["muted"], tones["paper"]) >= 4.5


@pytest.mark.parametrize("palette", [svg.LIGHT, svg.DARK])
@pytest.mark.parametrize(
    "vision",
    [
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ],
    ids=["protanopia", "deuteranopia"],
)  # the matrices of Machado et al., 2009
def test_the_first_four_colours_differ_for_the_colour_blind(palette, vision):
    seen = [_lab(np.array(vision) @ _linear(colour)) for colour in palette[:4]]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 10


def test_lines_differ_beyond_the_last_colour() -> None:
    looks = [svg.line_attributes(slot, dashed=True) for slot in range(3 * len(svg.LIGHT))]
    assert len({(look["stroke"], look["stroke_dasharray"]) for look in looks}) == len(looks)
