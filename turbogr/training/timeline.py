"""What ran when: every stage of every batch, as a trace to look at and as shares of the step.

The newest spans of rank 0 are in timeline.json. Every span of every rank goes, where that is asked for, to a file of
the rank in the folder timeline, a few thousand at a time, so memory stays bounded. That file is the array form of a
Chrome trace, an event a line, whose last bracket may be missing: it can be opened while the run goes on and after a
kill.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from turbogr.files import no_link, replace_text
from turbogr.streams import timed_event

TIMELINE = "timeline.json"
TIMELINES = "timeline"
_KEPT = 4096
_AT_ONCE = 2048
_LANES = ("main", "load", "exchange", "wait", "embed", "main on the device", "embed on the device")
_ISSUING = ("main", "embed")  # lanes whose stages compute on the device


class Span(NamedTuple):
    """`name` ran for step `step` on `lane` from `start` to `end`, seconds of `time.perf_counter`."""

    lane: str
    name: str
    step: int
    start: float
    end: float


class _DeviceSpan(NamedTuple):
    """A span between two events of a stream, whose times are read when both have happened."""

    lane: str
    name: str
    step: int
    begin: Any
    end: Any


class Timeline:
    """The newest few thousand spans of a rank; adding one costs about a microsecond, from any thread.

    On an accelerator a stage's span is how long the host took to issue its work. How long the device took is a second
    span, on a lane of the stream, from events that are read when they have happened, without waiting for one.
    """

    def __init__(self, rank: int = 0, device: torch.device | None = None) -> None:
        self.rank, self.device = rank, device or torch.device("cpu")
        self.spans: deque[Span] = deque(maxlen=_KEPT)
        self._on_device: deque[_DeviceSpan] = deque(maxlen=_KEPT)
        self._origin = timed_event(self.device), time.perf_counter()
        self._waiting: deque[Span] | None = None
        self._stream = Path()

    def stream_to(self, run: Path) -> None:
        """Keep all spans from here on, in the folder of a run; what an earlier process wrote there stays."""
        self._stream = run / TIMELINES / f"rank-{self.rank}.json"
        self._stream.parent.mkdir(exist_ok=True)
        _begin(self._stream, self.rank)
        self._waiting = deque()

    @contextmanager
    def span(self, lane: str, name: str, step: int) -> Iterator[None]:
        """Record the block."""
        begin = timed_event(self.device) if lane in _ISSUING else None
        started = time.perf_counter()
        try:
            yield
        finally:
            self._add(Span(lane, name, step, started, time.perf_counter()))
            if begin is not None:
                self._on_device.append(_DeviceSpan(lane, name, step, begin, timed_event(self.device)))

    def _add(self, span: Span) -> None:
        self.spans.append(span)
        if self._waiting is not None:
            self._waiting.append(span)

    def _read_device(self) -> None:
        """Read the spans of the device that have ended."""
        origin, at = self._origin
        while self._on_device and self._on_device[0].end.query():
            lane, name, step, *events = self._on_device.popleft()
            start, end = (at + origin.elapsed_time(event) / 1e3 for event in events)
            self._add(Span(f"{lane} on the device", name, step, start, end))

    def device_seconds(self) -> dict[str, float]:
        """Return how long the device was busy with each stage, over the spans that are kept; empty on a CPU."""
        self._read_device()
        seconds: dict[str, float] = {}
        for span in self.spans:
            if span.lane.endswith("on the device"):
                seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
        return seconds

    def flush(self, least: int = _AT_ONCE) -> None:
        """Append the spans that wait to the file, if there are at least so many; one thread calls this."""
        if len(self._on_device) >= least:
            self._read_device()
        if not self._waiting or len(self._waiting) < least:
            return
        spans = [self._waiting.popleft() for _ in range(len(self._waiting))]
        # Times of the day, so that ranks of a machine and the parts of an interrupted run stand beside each other.
        events = _events(spans, self.rank, time.perf_counter() - time.time())
        with open(self._stream, "ab", opener=no_link) as file:
            file.write("".join(f"{json.dumps(event)},\n" for event in events).encode())

    def to_trace(self) -> dict[str, Any]:
        """Return the newest spans in the form that Perfetto and chrome://tracing open, times in microseconds."""
        self._read_device()
        spans = sorted(self.spans, key=lambda span: span.start)
        used = {span.lane for span in spans}
        names = [event for event in _names(self.rank) if event["args"]["name"] in used]
        events = _events(spans, self.rank, spans[0].start if spans else 0.0)
        return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}

    def write(self, run: Path) -> None:
        """Write timeline.json into a run folder, unless nothing ran."""
        if self.spans:
            replace_text(run / TIMELINE, json.dumps(self.to_trace()) + "\n")


def _names(rank: int) -> Iterator[dict[str, Any]]:
    for number, lane in enumerate(_LANES):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}


def _events(spans: Iterable[Span], rank: int, origin: float) -> Iterator[dict[str, Any]]:
    for span in spans:
        yield {
            "ph": "X",
            "name": span.name,
            "pid": rank,
            "tid": _LANES.index(span.lane),
            "ts": round(1e6 * (span.start - origin), 1),
            "dur": round(1e6 * (span.end - span.start), 1),
            "args": {"step": span.step},
        }


def _begin(path: Path, rank: int) -> None:
    """Make the file of a rank, or cut the half line off that a kill may have left at its end."""
    if not path.exists():
        names = "".join(f"{json.dumps(event)},\n" for event in _names(rank))
        replace_text(path, f"[\n{names}")
        return
    with open(path, "r+b", opener=no_link) as file:
        file.truncate(_end_of_lines(file))


def _end_of_lines(file: Any, block: int = 1 << 16) -> int:
    """Where the last whole line of a file ends."""
    end = file.seek(0, 2)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        end = start
    return 0
