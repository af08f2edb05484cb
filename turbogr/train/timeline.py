"""What ran when: every stage of every batch, as a trace to look at and as shares of the step."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from turbogr.files import replace_text

TIMELINE = "timeline.json"
_KEPT = 4096


class Span(NamedTuple):
    """`name` ran for step `step` on `lane` from `start` to `end`, seconds of `time.perf_counter`."""

    lane: str
    name: str
    step: int
    start: float
    end: float


class Timeline:
    """The newest few thousand spans of a rank; adding one costs about a microsecond, from any thread."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.spans: deque[Span] = deque(maxlen=_KEPT)

    @contextmanager
    def span(self, lane: str, name: str, step: int) -> Iterator[None]:
        """Record the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(lane, name, step, started, time.perf_counter()))

    def to_trace(self) -> dict[str, Any]:
        """Return the spans in the form that Perfetto and chrome://tracing open, times in microseconds."""
        spans = sorted(self.spans, key=lambda span: span.start)
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in spans))}
        origin = spans[0].start if spans else 0.0
        names: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        events = [
            {
                "ph": "X",
                "name": span.name,
                "pid": self.rank,
                "tid": lanes[span.lane],
                "ts": round(1e6 * (span.start - origin), 1),
                "dur": round(1e6 * (span.end - span.start), 1),
                "args": {"step": span.step},
            }
            for span in spans
        ]
        return {"displayTimeUnit": "ms", "traceEvents": names + events}

    def write(self, run: Path) -> None:
        """Write timeline.json into a run folder, unless nothing ran."""
        if self.spans:
            replace_text(run / TIMELINE, json.dumps(self.to_trace()) + "\n")
