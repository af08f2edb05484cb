"""The parts a report is made of: sections with figures, each rendered from a template of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from turbogr.report.charts import Series
from turbogr.report.svg import STYLE

WIDE, NARROW = 540.0, 346.0  # a column of the page on a desk and on a phone, so that text keeps its size on both
_MAX_POINTS = 240


@dataclass(frozen=True)
class Figure:
    """A chart drawn twice, for wide and for narrow screens, with a caption."""

    wide: Markup
    narrow: Markup
    caption: str = ""

    @classmethod
    def draw(cls, chart: Callable[[float], str], caption: str = "") -> Figure:
        """Draw `chart(width)` for both kinds of screen."""
        return cls(_inline(chart(WIDE)), _inline(chart(NARROW)), caption)


@dataclass(frozen=True)
class Section:
    """One part of the page: `key` is its anchor, `template` a file of this folder, `context` what it shows."""

    key: str
    title: str
    template: str
    context: dict[str, Any] = field(default_factory=dict)


def _inline(svg: str) -> Markup:
    """Return a chart for a page that holds the charts' style once. The charts escape their own text."""
    return Markup(svg.replace(f"<style>{STYLE}</style>", "", 1))


def thinned(name: str, x: Sequence[float], y: Sequence[float], *, slot: int | None = None) -> Series:
    """Return a series of at most a few hundred points: means of equal stretches, with their extremes as the spread.

    Values that are not finite are left out; short series are kept as they are.
    """
    points = [(px, py) for px, py in zip(x, y, strict=True) if math.isfinite(px) and math.isfinite(py)]
    if len(points) <= _MAX_POINTS:
        return Series(name, [px for px, _ in points], [py for _, py in points], slot=slot)
    stretch = math.ceil(len(points) / _MAX_POINTS)
    groups = [points[start : start + stretch] for start in range(0, len(points), stretch)]
    return Series(
        name,
        [sum(px for px, _ in group) / len(group) for group in groups],
        [sum(py for _, py in group) / len(group) for group in groups],
        [min(py for _, py in group) for group in groups],
        [max(py for _, py in group) for group in groups],
        slot=slot,
    )
