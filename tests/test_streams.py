"""Streams and events: nothing on a CPU, and on an accelerator the right ones in the right order."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turbogr import streams
from turbogr.streams import WorkStream, tensors_of, upload, wait_for_event
from turbogr.training import timeline
from turbogr.training.pipeline.workers import Threaded
from turbogr.training.timeline import Timeline

CPU = torch.device("cpu")


@dataclass
class Parts:
    first: torch.Tensor
    others: dict[str, Any]


def test_all_tensors_of_a_value_are_found() -> None:
    a, b, c = (torch.tensor(number) for number in range(3))
    assert list(tensors_of(Parts(a, {"x": [b, 3, (c, None)], "y": "text"}))) == [a, b, c]
    assert list(tensors_of(Parts)) == []


def test_on_a_cpu_there_is_nothing_to_do() -> None:
    stream = WorkStream(CPU)
    with stream.active():
        assert stream.record() is None
    wait_for_event(None, torch.ones(1), CPU)
    batch: Any = object()
    assert upload(batch, CPU) is batch


def test_streams_wait_for_what_is_handed_over_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    here = threading.local()

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.name = "worker" if device is not None else "main"

        def __enter__(self) -> None:
            here.stream = self

        def __exit__(self, *error: object) -> None:
            del here.stream

        def record_event(self) -> str:
            log.append(f"{self.name} records")
            return f"event of {self.name}"

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for {event}")

    device: Any = SimpleNamespace(type="fast", index=None)

    class Held(torch.Tensor):
        @property
        def device(self) -> Any:  # type: ignore[override]
            return device

        def record_stream(self, stream: Any) -> None:
            log.append(f"{stream.name} owns {self.item():g}")

    def work(given: torch.Tensor) -> torch.Tensor:
        log.append("work")
        return torch.tensor(2.0).as_subclass(Held)

    monkeypatch.setattr(streams.torch, "Stream", Stream)
    monkeypatch.setattr(streams.torch.accelerator, "current_stream", lambda device: getattr(here, "stream", Stream()))
    worker = Threaded("embed", device, Timeline())
    job = worker.post(work, 0, torch.tensor(1.0).as_subclass(Held))
    assert isinstance(job.result(), Held)
    worker.close()
    assert log == [
        "main records",
        *("worker waits for event of main", "worker owns 1", "work", "worker records"),
        *("main waits for event of worker", "main owns 2"),
    ]


class Clock:
    """Events of a device whose time is set by hand; those after `now` have not happened."""

    now, issued = 0.0, 0.0

    def __init__(self) -> None:
        self.at = Clock.issued

    def query(self) -> bool:
        return self.at <= Clock.now

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


def test_the_timeline_shows_how_long_the_device_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "timed_event", lambda device: Clock())
    kept = Timeline(0, torch.device("meta"))
    for step, (lane, milliseconds) in enumerate([("main", 5.0), ("load", 1.0), ("embed", 2.0), ("main", 4.0)]):
        with kept.span(lane, "dense" if lane == "main" else lane, step):
            Clock.issued += milliseconds
    Clock.now = 9.0
    assert kept.device_seconds() == pytest.approx({"dense": 0.005, "embed": 0.002}), "the last one has not ended"
    Clock.now = 100.0
    assert kept.device_seconds() == pytest.approx({"dense": 0.009, "embed": 0.002})
    trace = kept.to_trace()["traceEvents"]
    lanes = {event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert lanes == {"main", "load", "embed", "main on the device", "embed on the device"}
    found = [event for event in trace if event["ph"] == "X" and event["tid"] == 5]
    assert [event["dur"] for event in found] == [5000.0, 4000.0] and found[1]["ts"] - found[0]["ts"] == 8000.0


def test_on_a_cpu_the_timeline_has_no_device() -> None:
    kept = Timeline()
    with kept.span("main", "dense", 0):
        pass
    assert not kept.device_seconds() and len(kept.spans) == 1
