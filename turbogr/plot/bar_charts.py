"""Charts of bars: histograms, bars beside each other, and spans of time on several tracks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from turbogr.plot.scales import Axis, Scale, drawable, shorten, text_width
from turbogr.plot.svg import LIGHT_TONES, SMALL, Frame, Mark, element, fill_attributes, label, tooltip

_LONGEST_BESIDE = 0.42  # share of a chart's width that names of bars may take beside them


@dataclass(frozen=True)
class Span:
    """From `start` to `end` on a `track`, in the colour of its `kind`; `text` is its tooltip."""

    track: str
    kind: str
    start: float
    end: float
    text: str


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

    `names` [n] replace the bins' edges in tooltips.
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
        frame.elements.append(element("rect", tooltip(f"{heading}: {y.format(count)}"), **size, **fill_attributes(0)))
        frame.hover.append(((left + right) / 2, heading, [(0, top, y.format(count))]))
    for mark in marks:
        if across.drawable(mark.x):
            frame.marker(across(mark.x), mark.text)
    peak = max(range(len(counts)), key=lambda i: counts[i])
    return frame.text(f"{title}: most at {names[peak]}")


def bar_chart(
    values: Mapping[str, float],
    *,
    title: str,
    axis: Axis | None = None,
    slots: Sequence[int] | None = None,
    errors: Sequence[float] | None = None,
    width: float = 560,
    row_height: float = 30,
) -> str:
    """Return one horizontal bar per name, each with its value, in the palette colours `slots` (default: all 0).

    `errors` are drawn as whiskers to both sides of a bar's end; one that is not finite is left out.
    """
    axis = axis or Axis(zero=True)
    note = 18 if axis.label else 0
    widest = max((text_width(name, SMALL) for name in values), default=0.0)
    above = 16 if widest > _LONGEST_BESIDE * width else 0  # long names stand above their bars, where they have room
    bar_height, row_height = row_height, row_height + above
    frame = Frame(title, width, max(60.0, 34 + note + row_height * len(values)))
    finite = [value for value in values.values() if drawable(value)]
    if not finite:
        return frame.empty()
    if axis.label:
        frame.elements.append(label(4, frame.top + 11, shorten(axis.label, SMALL, width - 8)))
        frame.top += note
    frame.left = 4 if above else 12 + widest
    frame.right -= 8 + max(text_width(axis.format(value), SMALL) for value in finite)
    spread = [error if drawable(error) else 0.0 for error in errors or [0.0] * len(values)]
    ends = [value + error for value, error in zip(values.values(), spread, strict=True) if drawable(value)]
    scale = Scale.fit([*finite, *ends, 0.0], axis, frame.left, frame.right)
    zero = scale(scale.low if axis.log else 0.0)
    for row, (name, value) in enumerate(values.items()):
        middle = frame.top + 6 + row_height * row + above + bar_height * 0.5
        text = axis.format(value) if drawable(value) else "not measured"
        slot = slots[row] if slots else 0
        if above:
            shown = shorten(name, SMALL, width - 8)
            frame.elements.append(label(frame.left, middle - bar_height * 0.33 - 5, shown, tone="ink"))
        else:
            frame.elements.append(label(frame.left - 8, middle + 4, name, tone="ink", anchor="end"))
        end = scale(value) if scale.drawable(value) else zero
        size = {
            "x": min(zero, end),
            "y": middle - bar_height * 0.33,
            "width": abs(end - zero),
            "height": bar_height * 0.66,
        }
        frame.elements.append(element("rect", tooltip(f"{name}: {text}"), **size, rx=2, **fill_attributes(slot)))
        reach = end
        if spread[row] > 0 and scale.drawable(value + spread[row]):
            low, reach = scale(max(value - spread[row], scale.low)), scale(value + spread[row])
            frame.elements += _whisker(low, reach, middle, bar_height * 0.16)
        frame.elements.append(label(max(zero, end, reach) + 6, middle + 4, text, tone="ink"))
    described = ", ".join(f"{name} {axis.format(value)}" for name, value in values.items())
    return frame.text(f"{title}: {described}")


def _whisker(low: float, high: float, middle: float, cap: float) -> list[str]:
    """Return a horizontal line from `low` to `high` with caps, in ink on paper, to stand out on a bar of any colour."""
    lines = [(low, high, middle, middle), *((x, x, middle - cap, middle + cap) for x in (low, high))]
    return [
        element("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=name, stroke_width=width, **_stroke(tone))
        for name, tone, width in (("halo", "paper", 4.0), ("whisker", "ink", 1.4))
        for x1, x2, y1, y2 in lines
    ]


def _stroke(tone: str) -> dict[str, str]:
    """Return the attributes of a line in a tone of the page, with the light one for viewers without variables."""
    return {"stroke": LIGHT_TONES[tone], "style": f"stroke:var(--c-{tone})"}


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
            frame.elements.append(element("rect", tooltip(f"{group}, {text}"), **size, rx=1, **fill_attributes(slot)))
            entries.append((slot, end, text))
        frame.hover.append((centre, group, entries))
    frame.category_labels(centres, groups, room - 4, x_label)
    described = "; ".join(f"{name} {', '.join(y.format(value) for value in column)}" for name, column in values.items())
    return frame.text(f"{title} for {', '.join(groups)}: {described}")


def span_chart(
    spans: Sequence[Span],
    *,
    title: str,
    x: Axis | None = None,
    width: float = 560,
    row_height: float = 26,
) -> str:
    """Return what happened when: tracks below each other, in the order of their first spans, and a colour per kind."""
    x = x or Axis()
    tracks = list(dict.fromkeys(span.track for span in spans))
    kinds = {kind: slot for slot, kind in enumerate(dict.fromkeys(span.kind for span in spans))}
    legend_rows = 17 * (1 + sum(40 + text_width(kind, SMALL) for kind in kinds) // max(1.0, width))
    frame = Frame(title, width, max(60.0, 76 + legend_rows + row_height * len(tracks)), list(kinds.items()))
    if not any(drawable(span.start) and drawable(span.end) for span in spans):
        return frame.empty()
    frame.make_room(x.label, "")
    across = frame.x_axis(x, [end for span in spans for end in (span.start, span.end)], tracks)
    for span in spans:
        if not (across.drawable(span.start) and across.drawable(span.end)):
            continue
        left, right = across(span.start), across(span.end)
        top = frame.top + row_height * tracks.index(span.track) + 3
        size = {"x": left, "y": top, "width": max(right - left, 0.6), "height": row_height - 6}
        frame.elements.append(element("rect", tooltip(span.text), **size, **fill_attributes(kinds[span.kind])))
    for row, track in enumerate(tracks):
        middle = frame.top + row_height * (row + 0.5)
        frame.elements.append(label(frame.left - 6, middle + 4, track, tone="ink", anchor="end"))
    return frame.text(f"{title}: {', '.join(kinds)} on {', '.join(tracks)}")
