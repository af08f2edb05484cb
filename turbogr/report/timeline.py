"""The timeline of a run: what ran on which thread during a few steps, and what the step's time was spent on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turbogr.report import wording
from turbogr.report.charts import Axis, Stretch, span_chart
from turbogr.report.section import Figure

_STEPS = 5
_KINDS = {"agree": "reduce", "exchange": "ids", "wait": "ids"}
_LANES = ("main", "load", "exchange", "wait", "embed")


def last_steps(trace: Mapping[str, Any] | None) -> list[Stretch]:
    """Return what ran during the last few steps of a timeline.json, in milliseconds from their start."""
    events = (trace or {}).get("traceEvents")
    events = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    lanes = {event.get("tid"): str(_arguments(event).get("name")) for event in events if event.get("ph") == "M"}
    spans = [_stretch(event, lanes) for event in events if event.get("ph") == "X"]
    spans = [span for span in spans if math.isfinite(span.start) and math.isfinite(span.end)]
    dense = [span for span in spans if span.kind == "dense"][-_STEPS:]
    if not dense:
        return []
    first, last = dense[0].start, dense[-1].end
    shown = [span for span in spans if span.end > first and span.start < last]
    shown.sort(key=lambda span: _LANES.index(span.lane) if span.lane in _LANES else len(_LANES))
    return [replace(span, start=max(span.start, first) - first, end=min(span.end, last) - first) for span in shown]


def _stretch(event: Mapping[str, Any], lanes: Mapping[Any, str]) -> Stretch:
    name = str(event.get("name"))
    start, length = (wording.number(event.get(key)) / 1e3 for key in ("ts", "dur"))
    text = f"{name}, step {wording.number(_arguments(event).get('step')) + 1:.0f}: {length:.1f} ms"
    return Stretch(lanes.get(event.get("tid"), "?"), _KINDS.get(name, name), start, start + length, text)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def timeline_figure(spans: list[Stretch]) -> Figure:
    """What ran when, a row per thread."""
    return Figure.draw(
        lambda width: span_chart(spans, title="The last steps", x=Axis("milliseconds"), width=width),
        "A row per thread of rank 0. timeline.json in the run folder has more; Perfetto and chrome://tracing open it.",
    )
