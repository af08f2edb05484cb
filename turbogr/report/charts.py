"""Every plot of the project: plain data in, standalone SVG text out.

Values that are not finite (or not positive on a logarithmic axis, or beyond 1e±100) are left out of the drawing: a
line breaks there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from turbogr.report.scales import Axis, Scale, drawable, percent, shorten, si, text_width
from turbogr.report.svg import LIGHT_TONES, SMALL, Frame, clean, element, fill_attributes, label, line_attributes

__all__ = [
    "Axis",
    "Mark",
    "Series",
    "Stretch",
    "bar_chart",
    "grouped_bar_chart",
    "histogram",
    "line_chart",
    "percent",
    "scatter_chart",
    "si",
    "span_chart",
]

_MAX_HOVER = 250


@dataclass(frozen=True)
class Series:
    """Named points; `low` and `high`, where given, are the spread around `y`; `slot` fixes the palette colour.

    Raises:
        ValueError: columns of different lengths, or only one of `low` and `high`.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    slot: int | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series '{self.name}' needs both low and high for a spread, or neither")
        for column in (self.y, self.low, self.high):
            if column is not None and len(column) != len(self.x):
                raise ValueError(f"series '{self.name}' has {len(self.x)} x values but a column of {len(column)}")


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x` with a few words on top; in a line chart also a ring around the point."""

    x: float
    y: float
    text: str
    slot: int = 0


@dataclass(frozen=True)
class Stretch:
    """From `start` to `end` on `lane`, in the colour of its `kind`; `text` is what a pointer reveals."""

    lane: str
    kind: str
    start: float
    end: float
    text: str


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis | None = None,
    y: Axis | None = None,
    marks: Sequence[Mark] = (),
    width: float = 560,
    height: float = 300,
) -> str:
    """Return lines over a common x axis, each with its spread as a band where it has one."""
    x, y = x or Axis(), y or Axis()
    headroom = 16.0 if marks else 0.0
    frame, across, down = _xy_frame(series, title, x, y, width, height, dashed=True, headroom=headroom)
    if across is None or down is None:
        return frame.empty()
    drawn = [mark for mark in marks if across.drawable(mark.x) and down.drawable(mark.y)]
    for mark in drawn:
        _draw_rule(frame, across(mark.x), mark.text)
    for slot, one in _slots(series):
        _draw_band(frame, one, slot, across, down)
    for slot, one in _slots(series):
        _draw_line(frame, one, slot, across, down)
    for mark in drawn:
        ring = {**line_attributes(mark.slot), "stroke_width": 2.0}
        frame.elements.append(element("circle", cx=across(mark.x), cy=down(mark.y), r=5.5, **ring))
    _line_hover(frame, series, x, y, across, down)
    return frame.text(_describe_series(title, series, y))


def scatter_chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis | None = None,
    y: Axis | None = None,
    reference: Series | None = None,
    width: float = 560,
    height: float = 300,
) -> str:
    """Return points, with `reference` (such as y = x) as a thin dashed line behind them."""
    x, y = x or Axis(), y or Axis()
    extent = [*series, *([reference] if reference else [])]
    frame, across, down = _xy_frame(extent, title, x, y, width, height, dashed=False, legend=series)
    if across is None or down is None:
        return frame.empty()
    if reference is not None:
        stroke = {"class_": "axis", "stroke": LIGHT_TONES["muted"], "stroke_dasharray": "4 4", "fill": "none"}
        for path in _paths(reference.x, reference.y, across, down):
            frame.elements.append(element("path", _tip(reference.name), d=path, **stroke))
        _reference_label(frame, reference, across, down)
    for slot, one in _slots(series):
        for px, py in zip(one.x, one.y, strict=True):
            if across.drawable(px) and down.drawable(py):
                frame.elements.append(
                    element("circle", cx=across(px), cy=down(py), r=3.2, **fill_attributes(slot, opacity=0.75))
                )
    _line_hover(frame, series, x, y, across, down)
    return frame.text(_describe_series(title, series, y))


def histogram(
    edges: Sequence[float],
    counts: Sequence[float],
    *,
    title: str,
    x: Axis | None = None,
    y: Axis | None = None,
    names: Sequence[str] | None = None,
    marks: Sequence[Mark] = (),
    width: float = 560,
    height: float = 260,
) -> str:
    """Return bars over adjacent bins: `edges` [n + 1] ascending, `counts` [n]; a mark is a vertical line at its x.

    `names` [n] are the bins in words, where their edges are not what a reader should see.
    """
    if len(edges) != len(counts) + 1:
        raise ValueError(f"{len(counts)} bins need {len(counts) + 1} edges, got {len(edges)}")
    x, y = x or Axis(), y or Axis(zero=True)
    frame = Frame(title, width, height)
    if not any(drawable(count) and count > 0 for count in counts) or not any(drawable(edge, x.log) for edge in edges):
        return frame.empty()
    across, down = frame.axes(x, [*edges, *(mark.x for mark in marks)], y, counts, headroom=16 if marks else 0)
    names = names or [f"{x.format(low)} to {x.format(high)}" for low, high in pairwise(edges)]
    for (low, high), count, heading in zip(pairwise(edges), counts, names, strict=True):
        if not (across.drawable(low) and across.drawable(high) and down.drawable(count)):
            continue
        left, right = across(low), across(high)
        top = min(down(count), frame.bottom)
        size = {"x": left, "y": top, "width": max(right - left - 1, 0.5), "height": max(frame.bottom - top, 0.0)}
        frame.elements.append(element("rect", _tip(f"{heading}: {y.format(count)}"), **size, **fill_attributes(0)))
        frame.hover.append(((left + right) / 2, heading, [(0, top, y.format(count))]))
    for mark in marks:
        if across.drawable(mark.x):
            _draw_rule(frame, across(mark.x), mark.text)
    peak = max(range(len(counts)), key=lambda i: counts[i])
    return frame.text(f"{title}: most at {names[peak]}")


def bar_chart(
    values: Mapping[str, float],
    *,
    title: str,
    axis: Axis | None = None,
    slots: Sequence[int] | None = None,
    width: float = 560,
    row_height: float = 30,
) -> str:
    """Return one horizontal bar per name, each with its value; every bar in slot 0 unless `slots` says otherwise."""
    axis = axis or Axis(zero=True)
    note = 18 if axis.label else 0
    frame = Frame(title, width, max(60.0, 34 + note + row_height * len(values)))
    finite = [value for value in values.values() if drawable(value)]
    if not finite:
        return frame.empty()
    if axis.label:
        frame.elements.append(label(4, frame.top + 11, shorten(axis.label, SMALL, width - 8)))
        frame.top += note
    frame.left = 12 + min(0.42 * width, max(text_width(name, SMALL) for name in values))
    frame.right -= 8 + max(text_width(axis.format(value), SMALL) for value in finite)
    scale = Scale.fit([*finite, 0.0], axis, frame.left, frame.right)
    zero = scale(scale.low if axis.log else 0.0)
    for row, (name, value) in enumerate(values.items()):
        middle = frame.top + 6 + row_height * (row + 0.5)
        text = axis.format(value) if drawable(value) else "not measured"
        slot = slots[row] if slots else 0
        shown = shorten(name, SMALL, frame.left - 12)
        frame.elements.append(label(frame.left - 8, middle + 4, shown, tone="ink", anchor="end"))
        end = scale(value) if scale.drawable(value) else zero
        size = {
            "x": min(zero, end),
            "y": middle - row_height * 0.33,
            "width": abs(end - zero),
            "height": row_height * 0.66,
        }
        frame.elements.append(element("rect", _tip(f"{name}: {text}"), **size, rx=2, **fill_attributes(slot)))
        frame.elements.append(label(max(zero, end) + 6, middle + 4, text, tone="ink"))
    described = ", ".join(f"{name} {axis.format(value)}" for name, value in values.items())
    return frame.text(f"{title}: {described}")


def grouped_bar_chart(
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str = "",
    y: Axis | None = None,
    width: float = 560,
    height: float = 280,
) -> str:
    """Return upright bars side by side: `values` holds, per series name, one number for each of `groups`."""
    for name, column in values.items():
        if len(column) != len(groups):
            raise ValueError(f"series '{name}' has {len(column)} values for {len(groups)} groups")
    y = y or Axis(zero=True)
    frame = Frame(title, width, height, [(name, slot) for slot, name in enumerate(values)])
    numbers = [value for column in values.values() for value in column if drawable(value, y.log)]
    if not numbers:
        return frame.empty()
    frame.make_room(x_label, y.label)
    down = frame.y_axis(y, numbers)
    floor = down(down.low if y.log else max(down.low, 0.0))
    room = (frame.right - frame.left) / len(groups)
    bar = min(room * 0.8 / len(values), 44.0)
    centres = [frame.left + room * (index + 0.5) for index in range(len(groups))]
    for index, (centre, group) in enumerate(zip(centres, groups, strict=True)):
        entries = []
        for slot, (name, column) in enumerate(values.items()):
            if not down.drawable(column[index]):
                continue
            end, text = down(column[index]), f"{name}: {y.format(column[index])}"
            left = centre + (slot - len(values) / 2) * bar
            size = {"x": left + 1, "y": min(end, floor), "width": bar - 2, "height": abs(floor - end)}
            frame.elements.append(element("rect", _tip(f"{group}, {text}"), **size, rx=1, **fill_attributes(slot)))
            entries.append((slot, end, text))
        frame.hover.append((centre, group, entries))
    frame.category_labels(centres, groups, room - 4, x_label)
    described = "; ".join(f"{name} {', '.join(y.format(value) for value in column)}" for name, column in values.items())
    return frame.text(f"{title} for {', '.join(groups)}: {described}")


def span_chart(
    stretches: Sequence[Stretch],
    *,
    title: str,
    x: Axis | None = None,
    width: float = 560,
    row_height: float = 26,
) -> str:
    """Return what happened when, one row per lane in the order of their first stretches, a colour per kind."""
    x = x or Axis()
    lanes = list(dict.fromkeys(one.lane for one in stretches))
    kinds = {kind: slot for slot, kind in enumerate(dict.fromkeys(one.kind for one in stretches))}
    legend_rows = 17 * (1 + sum(40 + text_width(kind, SMALL) for kind in kinds) // max(1.0, width))
    frame = Frame(title, width, max(60.0, 76 + legend_rows + row_height * len(lanes)), list(kinds.items()))
    if not any(drawable(one.start) and drawable(one.end) for one in stretches):
        return frame.empty()
    frame.make_room(x.label, "")
    across = frame.x_axis(x, [place for one in stretches for place in (one.start, one.end)], lanes)
    for one in stretches:
        if not (across.drawable(one.start) and across.drawable(one.end)):
            continue
        left, right = across(one.start), across(one.end)
        top = frame.top + row_height * lanes.index(one.lane) + 3
        size = {"x": left, "y": top, "width": max(right - left, 0.6), "height": row_height - 6}
        frame.elements.append(element("rect", _tip(one.text), **size, **fill_attributes(kinds[one.kind])))
    for row, lane in enumerate(lanes):
        middle = frame.top + row_height * (row + 0.5)
        frame.elements.append(label(frame.left - 6, middle + 4, lane, tone="ink", anchor="end"))
    return frame.text(f"{title}: {', '.join(kinds)} on {', '.join(lanes)}")


def _xy_frame(
    series: Sequence[Series],
    title: str,
    x: Axis,
    y: Axis,
    width: float,
    height: float,
    *,
    dashed: bool,
    legend: Sequence[Series] | None = None,
    headroom: float = 0.0,
) -> tuple[Frame, Scale | None, Scale | None]:
    """Return the frame around `series` and its scales, or None for these when no point can be drawn."""
    entries = [(one.name, slot) for slot, one in _slots(series if legend is None else legend)]
    frame = Frame(title, width, height, entries, dashed=dashed)
    points = [
        (px, py, column is one.y)
        for one in series
        for column in (one.y, one.low, one.high)
        if column is not None
        for px, py in zip(one.x, column, strict=True)
        if drawable(px, x.log) and drawable(py, y.log)
    ]
    if not any(is_line for _, _, is_line in points):
        return frame, None, None
    across, down = frame.axes(x, [px for px, _, _ in points], y, [py for _, py, _ in points], headroom=headroom)
    return frame, across, down


def _slots(series: Sequence[Series]) -> list[tuple[int, Series]]:
    return [(place if one.slot is None else one.slot, one) for place, one in enumerate(series)]


def _tip(text: str) -> str:
    return element("title", clean(text))


def _segments(
    x: Sequence[float], columns: Sequence[Sequence[float]], across: Scale, down: Scale
) -> list[list[tuple[float, ...]]]:
    """Return runs of (x pixel, pixel of each column), broken wherever a value cannot be drawn."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for px, *values in zip(x, *columns, strict=True):
        if across.drawable(px) and all(down.drawable(value) for value in values):
            runs[-1].append((across(px), *(down(value) for value in values)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _paths(x: Sequence[float], y: Sequence[float], across: Scale, down: Scale) -> list[str]:
    runs = _segments(x, [y], across, down)
    return ["M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in run) for run in runs if len(run) > 1]


def _draw_band(frame: Frame, one: Series, slot: int, across: Scale, down: Scale) -> None:
    if one.low is None or one.high is None:
        return
    for run in _segments(one.x, [one.low, one.high], across, down):
        lower = [f"{px:.1f} {low:.1f}" for px, low, _ in run]
        upper = [f"{px:.1f} {high:.1f}" for px, _, high in reversed(run)]
        frame.elements.append(
            element("path", d="M" + "L".join(lower + upper) + "Z", **fill_attributes(slot, opacity=0.18))
        )


def _draw_line(frame: Frame, one: Series, slot: int, across: Scale, down: Scale) -> None:
    for path in _paths(one.x, one.y, across, down):
        frame.elements.append(element("path", d=path, **line_attributes(slot, dashed=True)))
    runs = _segments(one.x, [one.y], across, down)
    few = sum(len(run) for run in runs) <= 12  # so few points are measurements in their own right; show each
    for run in runs:
        if few or len(run) == 1:
            for px, py in run:
                frame.elements.append(element("circle", cx=px, cy=py, r=2.6, **fill_attributes(slot)))


def _draw_rule(frame: Frame, px: float, text: str) -> None:
    stroke = {"class_": "axis", "stroke": LIGHT_TONES["muted"], "stroke_dasharray": "4 3"}
    frame.elements.append(element("line", x1=px, x2=px, y1=frame.top - 14, y2=frame.bottom, **stroke))
    leftwards = px + 6 + text_width(text, SMALL) > frame.right
    anchor, shift = ("end", -5.0) if leftwards else ("start", 5.0)
    frame.elements.append(label(px + shift, frame.top - 5, text, tone="ink", anchor=anchor))


def _reference_label(frame: Frame, reference: Series, across: Scale, down: Scale) -> None:
    runs = _segments(reference.x, [reference.y], across, down)
    if runs and reference.name:
        px, py = runs[-1][-1]
        frame.elements.append(label(px - 4, max(py - 6, frame.top + 10), reference.name, anchor="end", class_="halo"))


def _line_hover(frame: Frame, series: Sequence[Series], x: Axis, y: Axis, across: Scale, down: Scale) -> None:
    """Let a pointer reveal, at every x of the data (evenly thinned), the value of each series that has one there."""
    found: dict[float, list[tuple[int, float, str]]] = {}
    for slot, one in _slots(series):
        prefix = f"{one.name}: " if len(series) > 1 else ""
        for px, py in zip(one.x, one.y, strict=True):
            if across.drawable(px) and down.drawable(py):
                found.setdefault(px, []).append((slot, down(py), prefix + y.format(py)))
    places = sorted(found)
    stride = math.ceil(len(places) / _MAX_HOVER)
    for place in places[::stride] if stride else []:
        frame.hover.append((across(place), f"{x.label} {x.format(place)}".strip(), found[place]))


def _describe_series(title: str, series: Sequence[Series], y: Axis) -> str:
    parts = []
    for one in series:
        finite = [value for value in one.y if drawable(value)]
        if finite:
            parts.append(f"{one.name} from {y.format(finite[0])} to {y.format(finite[-1])}")
    return f"{title}: {'; '.join(parts)}"
