"""The timeline of a run as a figure: what ran on which thread during the last steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turbogr.plot import Axis, Span, span_chart
from turbogr.report import wording
from turbogr.report.section import Figure

_STEPS = 5
_KINDS = {"agree": "reduce", "exchange": "ids", "wait": "ids"}
_THREADS = ("main", "load", "exchange", "wait", "embed")


def last_steps(trace: Mapping[str, Any] | None) -> list[Span]:
    """Return what ran during the last few steps of a timeline.json, in milliseconds from their start."""
    events = (trace or {}).get("traceEvents")
    events = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    threads = {event.get("tid"): str(_arguments(event).get("name")) for event in events if event.get("ph") == "M"}
    spans = [_span(event, threads) for event in events if event.get("ph") == "X"]
    spans = [span for span in spans if math.isfinite(span.start) and math.isfinite(span.end)]
    dense = [span for span in spans if span.kind == "dense"][-_STEPS:]
    if not dense:
        return []
    first, last = dense[0].start, dense[-1].end
    shown = [span for span in spans if span.end > first and span.start < last]
    shown.sort(key=lambda span: _THREADS.index(span.track) if span.track in _THREADS else len(_THREADS))
    return [replace(span, start=max(span.start, first) - first, end=min(span.end, last) - first) for span in shown]


def _span(event: Mapping[str, Any], threads: Mapping[Any, str]) -> Span:
    name = str(event.get("name"))
    start, length = (wording.number(event.get(key)) / 1e3 for key in ("ts", "dur"))
    text = f"{name}, step {wording.number(_arguments(event).get('step')) + 1:.0f}: {length:.1f} ms"
    return Span(threads.get(event.get("tid"), "?"), _KINDS.get(name, name), start, start + length, text)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def timeline_figure(spans: list[Span]) -> Figure:
    """Draw the spans, a track per thread."""
    return Figure.draw(
        lambda width: span_chart(spans, title="The last steps", x=Axis("milliseconds"), width=width),
        "The threads of rank 0. timeline.json in the run folder has more steps; Perfetto and chrome://tracing open it.",
    )
