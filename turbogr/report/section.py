"""The parts of a report: sections, each with its template, and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from turbogr.plot import STYLE, Axis, Mark, Series, line_chart

WIDE, NARROW = 540.0, 346.0  # width of a column on a desktop and on a phone, so that text has its size on both


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
    """One part of the page: `key` is its anchor, `template` a file of this folder, `context` the template's values."""

    key: str
    title: str
    template: str
    context: dict[str, Any] = field(default_factory=dict)


def line_figure(
    series: list[Series], title: str, x: Axis, y: Axis, marks: Sequence[Mark] = (), caption: str = ""
) -> Figure:
    """Draw lines over a common axis as a figure."""
    return Figure.draw(
        lambda width: line_chart(series, title=title, x=x, y=y, marks=marks, width=width, height=280), caption
    )


def _inline(svg: str) -> Markup:
    """Return a chart for a page that holds the charts' style once. The charts escape their own text."""
    return Markup(svg.replace(f"<style>{STYLE}</style>", "", 1))
