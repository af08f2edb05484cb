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
