"""Charts of points over two axes: lines with bands, and scattered points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turbogr.plot.scales import Axis, Scale, drawable
from turbogr.plot.svg import LIGHT_TONES, Frame, Mark, element, fill_attributes, label, line_attributes, tooltip

_MAX_HOVER = 250
_MAX_POINTS = 240


@dataclass(frozen=True)
class Series:
    """Named points; `low` and `high`, where given, are the spread around `y`; `slot` is the palette colour.

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


def thinned(name: str, x: Sequence[float], y: Sequence[float], *, slot: int | None = None) -> Series:
    """Return a series of at most 240 points: means of equally many neighbours, with their extremes as the spread.

    Values that are not finite are left out; short series are kept as they are.
    """
    points = [(px, py) for px, py in zip(x, y, strict=True) if math.isfinite(px) and math.isfinite(py)]
    if len(points) <= _MAX_POINTS:
        return Series(name, [px for px, _ in points], [py for _, py in points], slot=slot)
    size = math.ceil(len(points) / _MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return Series(
        name,
        [sum(px for px, _ in group) / len(group) for group in groups],
        [sum(py for _, py in group) / len(group) for group in groups],
        [min(py for _, py in group) for group in groups],
        [max(py for _, py in group) for group in groups],
        slot=slot,
    )


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
    """Return lines over a common x axis, each with its spread as a band, if it has one."""
    x, y = x or Axis(), y or Axis()
    headroom = 16.0 if marks else 0.0
    frame, across, down = _xy_frame(series, title, x, y, width, height, dashed=True, headroom=headroom)
    if across is None or down is None:
        return frame.empty()
    drawn = [mark for mark in marks if across.drawable(mark.x) and down.drawable(mark.y)]
    for mark in drawn:
        frame.marker(across(mark.x), mark.text)
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
            frame.elements.append(element("path", tooltip(reference.name), d=path, **stroke))
        _reference_label(frame, reference, across, down)
    for slot, one in _slots(series):
        for px, py in zip(one.x, one.y, strict=True):
            if across.drawable(px) and down.drawable(py):
                frame.elements.append(
                    element("circle", cx=across(px), cy=down(py), r=3.2, **fill_attributes(slot, opacity=0.75))
                )
    _line_hover(frame, series, x, y, across, down)
    return frame.text(_describe_series(title, series, y))


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
    """Return the frame around `series` and its two scales, which are None if no point can be drawn."""
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
    few = sum(len(run) for run in runs) <= 12  # each of so few points is shown
    for run in runs:
        if few or len(run) == 1:
            for px, py in run:
                frame.elements.append(element("circle", cx=px, cy=py, r=2.6, **fill_attributes(slot)))


def _reference_label(frame: Frame, reference: Series, across: Scale, down: Scale) -> None:
    runs = _segments(reference.x, [reference.y], across, down)
    if runs and reference.name:
        px, py = runs[-1][-1]
        frame.elements.append(label(px - 4, max(py - 6, frame.top + 10), reference.name, anchor="end", class_="halo"))


def _line_hover(frame: Frame, series: Sequence[Series], x: Axis, y: Axis, across: Scale, down: Scale) -> None:
    """Add tooltips: at every x of the data (evenly thinned) the value of each series that has one there."""
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
