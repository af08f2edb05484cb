"""SVG elements, the palette, and the frame of a chart: title, legend and axes.

A chart is standalone SVG text. Colours are CSS variables with a light and a dark value, so that one file works in a
page, in an image viewer and in both themes; a page can override `--chart-paper` and `--chart-font`. Every coloured
element also has its light colour as an attribute, for viewers without CSS variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from turbogr.plot.scales import Axis, Scale, shorten, text_width, thin_labels

# Okabe and Ito's hues, moved in lightness until each has a contrast of 3 or more on its paper.
LIGHT = ("#0068a8", "#c24e0e", "#00805d", "#9a4788", "#8a6a00", "#6b7685")
DARK = ("#5ab4f0", "#f5955a", "#3fcf9f", "#e2a0d2", "#e6c14a", "#aab4c0")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 4")
LIGHT_TONES = {"ink": "#1c2128", "muted": "#58626d", "grid": "#dde2e8", "paper": "#ffffff"}
DARK_TONES = {"ink": "#e8ecf1", "muted": "#9ba6b2", "grid": "#333b45", "paper": "#14181d"}

FONT_SIZE = 12.0
SMALL = 11.0
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _variables(tones: dict[str, str], palette: Sequence[str]) -> str:
    colours = {**tones, **{f"s{slot}": colour for slot, colour in enumerate(palette)}}
    colours["paper"] = f"var(--chart-paper,{colours['paper']})"
    return "".join(f"--c-{name}:{colour};" for name, colour in colours.items())


def _style() -> str:
    rules = [
        f".chart{{{_variables(LIGHT_TONES, LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{.chart{{{_variables(DARK_TONES, DARK)}}}}}",
        f"@media print{{.chart{{{_variables(LIGHT_TONES, LIGHT)}}}}}",
        ".chart text{font-family:var(--chart-font,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif);"
        f"font-size:{SMALL:g}px;font-variant-numeric:tabular-nums}}",
        f".chart .title{{font-size:{FONT_SIZE + 1:g}px;font-weight:600}}",
        ".chart .paper{fill:var(--c-paper)}",
        ".chart .grid{stroke:var(--c-grid)}",
        ".chart .axis{stroke:var(--c-muted)}",
        ".chart .ink{fill:var(--c-ink)}",
        ".chart .muted{fill:var(--c-muted)}",
        ".chart .halo{paint-order:stroke;stroke:var(--c-paper);stroke-width:3px;stroke-linejoin:round}",
    ]
    for slot in range(len(LIGHT)):
        rules.append(f".chart .l{slot}{{stroke:var(--c-s{slot})}}.chart .f{slot}{{fill:var(--c-s{slot})}}")
    return "".join(rules)


STYLE = _style()


def clean(text: str) -> str:
    """Return `text` escaped for XML, without the characters that XML cannot hold."""
    return escape(_NOT_XML.sub("\ufffd", text), quote=True)


def element(name: str, content: str = "", /, **attributes: str | float | None) -> str:
    """Return one element; `content` is markup, attribute values are text; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _value(value: str | float) -> str:
    return clean(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def label(x: float, y: float, text: str, *, tone: str = "muted", anchor: str = "start", class_: str = "") -> str:
    """Return a text element with its baseline at (x, y)."""
    name = f"{tone} {class_}".strip()
    fill = LIGHT_TONES[tone]
    return element("text", clean(text), class_=name, fill=fill, x=x, y=y, text_anchor=anchor)


def tooltip(text: str) -> str:
    """Return the child element that browsers show as an element's tooltip."""
    return element("title", clean(text))


def line_attributes(slot: int, *, dashed: bool = False) -> dict[str, str | float | None]:
    """Return the attributes of a line in palette slot `slot`; beyond the last colour, lines differ by their dashes."""
    lap, slot = divmod(slot, len(LIGHT))
    dashes = DASHES[(slot + lap) % len(DASHES)]
    return {
        "class_": f"l{slot}",
        "stroke": LIGHT[slot],
        "stroke_width": 1.8,
        "stroke_linejoin": "round",
        "stroke_linecap": "round",
        "stroke_dasharray": (dashes or None) if dashed else None,
        "fill": "none",
    }


def fill_attributes(slot: int, *, opacity: float | None = None) -> dict[str, str | float | None]:
    """Return the attributes of an area in palette slot `slot`."""
    slot %= len(LIGHT)
    return {"class_": f"f{slot}", "fill": LIGHT[slot], "fill_opacity": opacity}


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x` with a few words on top; in a line chart also a ring around the point."""

    x: float
    y: float
    text: str
    slot: int = 0


@dataclass
class Frame:
    """A chart that is being drawn: title and legend on top, axes around the plot, elements in between.

    `hover` holds the tooltips, (x pixel, heading, [(slot, y pixel, text)]).
    """

    title: str
    width: float
    height: float
    legend: Sequence[tuple[str, int]] = ()
    dashed: bool = False
    elements: list[str] = field(default_factory=list)
    hover: list[tuple[float, str, list[tuple[int, float, str]]]] = field(default_factory=list)
    left: float = 4.0
    right: float = 0.0
    top: float = 0.0
    bottom: float = 0.0

    def __post_init__(self) -> None:
        assert self.width >= 200 and self.height >= 60
        self.right, self.bottom = self.width - 10.0, self.height - 6.0
        self.top = 26.0
        heading = shorten(self.title, FONT_SIZE + 2, self.width - 8)
        self.elements.append(label(4, 17, heading, tone="ink", class_="title"))
        self._draw_legend()

    def _draw_legend(self) -> None:
        if len(self.legend) < 2:
            return
        x, y = 4.0, self.top + 11
        for name, slot in self.legend:
            text = shorten(name, SMALL, self.width - 40)
            needed = 26 + text_width(text, SMALL) + 14
            if x > 4.0 and x + needed > self.width:
                x, y = 4.0, y + 17
            if self.dashed:
                stroke = line_attributes(slot, dashed=True)
                self.elements.append(element("line", x1=x, x2=x + 20, y1=y - 4, y2=y - 4, **stroke))
            else:
                self.elements.append(
                    element("rect", x=x + 6, y=y - 9, width=11, height=11, rx=2, **fill_attributes(slot))
                )
            self.elements.append(label(x + 26, y, text, tone="ink"))
            x += needed
        self.top = y + 12

    def axes(
        self, x: Axis, xs: Sequence[float], y: Axis, ys: Sequence[float], *, headroom: float = 0.0
    ) -> tuple[Scale, Scale]:
        """Draw grid, ticks and labels for data that reach over `xs` and `ys`; return the two scales."""
        self.make_room(x.label, y.label)
        self.top += headroom
        down = self.y_axis(y, ys)
        return self._ticks_below(x, xs), down

    def x_axis(self, x: Axis, xs: Sequence[float], names: Sequence[str]) -> Scale:
        """Draw ticks and labels below rows called `names`, with room for these on the left; return the scale."""
        self.left = 10 + max((text_width(name, SMALL) for name in names), default=0.0)
        self.baseline()
        return self._ticks_below(x, xs)

    def _ticks_below(self, x: Axis, xs: Sequence[float]) -> Scale:
        across = Scale.fit(xs, x, self.left, self.right)
        places = across.ticks(max(2, int((self.right - self.left) / 70)), integer=x.integer)
        texts = [x.format(tick) for tick in places]
        pixels = [across(tick) for tick in places]
        for index in thin_labels(pixels, texts, SMALL):
            pixel = pixels[index]
            self.elements.append(
                element(
                    "line",
                    class_="axis",
                    stroke=LIGHT_TONES["muted"],
                    x1=pixel,
                    x2=pixel,
                    y1=self.bottom,
                    y2=self.bottom + 4,
                )
            )
            self.elements.append(self._tick_label(pixel, texts[index]))
        self._x_label(x.label)
        return across

    def make_room(self, x_label: str, y_label: str) -> None:
        """Leave space under the plot for ticks and `x_label`, and write `y_label` above it."""
        if y_label:
            self.elements.append(label(4, self.top + 11, shorten(y_label, SMALL, self.width - 8)))
            self.top += 20
        self.bottom -= 18 + (15 if x_label else 0)

    def y_axis(self, y: Axis, ys: Sequence[float]) -> Scale:
        """Draw the horizontal grid lines with their labels and make room for these on the left; return the scale."""
        down = Scale.fit(ys, y, self.bottom, self.top, pad=0.04)
        places = down.ticks(max(2, int((self.bottom - self.top) / 36)), integer=y.integer)
        texts = [y.format(tick) for tick in places]
        self.left = 10 + max((text_width(text, SMALL) for text in texts), default=0.0)
        for tick, text in zip(places, texts, strict=True):
            pixel = down(tick)
            self.elements.append(
                element(
                    "line", class_="grid", stroke=LIGHT_TONES["grid"], x1=self.left, x2=self.right, y1=pixel, y2=pixel
                )
            )
            self.elements.append(label(self.left - 6, pixel + 4, text, anchor="end"))
        self.baseline()
        return down

    def baseline(self) -> None:
        """Draw the x axis line."""
        self.elements.append(
            element(
                "line",
                class_="axis",
                stroke=LIGHT_TONES["muted"],
                x1=self.left,
                x2=self.right,
                y1=self.bottom,
                y2=self.bottom,
            )
        )

    def marker(self, px: float, text: str) -> None:
        """Draw a dashed vertical line at pixel `px` with `text` beside its top."""
        stroke = {"class_": "axis", "stroke": LIGHT_TONES["muted"], "stroke_dasharray": "4 3"}
        self.elements.append(element("line", x1=px, x2=px, y1=self.top - 14, y2=self.bottom, **stroke))
        to_the_left = px + 6 + text_width(text, SMALL) > self.right
        anchor, shift = ("end", -5.0) if to_the_left else ("start", 5.0)
        self.elements.append(label(px + shift, self.top - 5, text, tone="ink", anchor=anchor))

    def category_labels(self, centres: Sequence[float], names: Sequence[str], room: float, x_label: str) -> None:
        """Write a name under each centre, cut to `room` pixels."""
        for centre, name in zip(centres, names, strict=True):
            self.elements.append(label(centre, self.bottom + 16, shorten(name, SMALL, room), anchor="middle"))
        self._x_label(x_label)

    def _tick_label(self, pixel: float, text: str) -> str:
        """Return the label under an x tick, kept inside the chart."""
        half = text_width(text, SMALL) / 2
        inside = min(max(pixel, half + 1), self.width - half - 1)
        return label(inside, self.bottom + 16, text, anchor="middle")

    def _x_label(self, text: str) -> None:
        if text:
            room = self.right - self.left
            self.elements.append(
                label((self.left + self.right) / 2, self.bottom + 32, shorten(text, SMALL, room), anchor="middle")
            )

    def empty(self) -> str:
        """Return the chart with a sentence instead of a plot."""
        self.elements.append(label(self.width / 2, self.height / 2 + 10, "nothing to draw yet", anchor="middle"))
        return self.text(f"{self.title}: nothing to draw yet")

    def text(self, description: str) -> str:
        """Return the finished SVG; `description` is its text for screen readers."""
        hover = {
            "plot": [round(edge, 1) for edge in (self.left, self.top, self.right, self.bottom)],
            "points": [
                [
                    round(place, 1),
                    heading,
                    [[slot % len(LIGHT), round(across, 1), text] for slot, across, text in entries],
                ]
                for place, heading, entries in self.hover
            ],
        }
        paper = element("rect", class_="paper", fill=LIGHT_TONES["paper"], width=self.width, height=self.height)
        body = f"<title>{clean(self.title)}</title><style>{STYLE}</style>{paper}{''.join(self.elements)}"
        return element(
            "svg",
            body,
            xmlns="http://www.w3.org/2000/svg",
            class_="chart",
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            width=self.width,
            height=self.height,
            role="img",
            aria_label=description,
            data_hover=json.dumps(hover, ensure_ascii=False, separators=(",", ":")) if self.hover else None,
        )
