"""Streams and events: nothing on a CPU, and on an accelerator the right ones in the right order."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turbogr.train import lanes
from turbogr.train.lanes import Lane, follow, tensors_of, upload
from turbogr.train.timeline import Timeline
from turbogr.train.workers import Threaded

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
    lane = Lane(CPU)
    with lane.active():
        assert lane.mark() is None
    follow(None, torch.ones(1), CPU)
    batch: Any = object()
    assert upload(batch, CPU) is batch


def test_what_a_worker_hands_over_is_waited_for_by_the_stream_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.name = "worker" if device is not None else "main"

        def __enter__(self) -> None:
            told.append("enter")

        def __exit__(self, *error: object) -> None:
            told.append("exit")

        def record_event(self) -> str:
            told.append("record")
            return "event"

        def wait_event(self, event: str) -> None:
            told.append(f"{self.name} waits for {event}")

    device: Any = SimpleNamespace(type="fast")
    tensor = torch.ones(1)
    owned: list[str] = []

    class Held(torch.Tensor):
        @property
        def device(self) -> Any:  # type: ignore[override]
            return device

        def record_stream(self, stream: Any) -> None:
            owned.append(stream.name)

    monkeypatch.setattr(lanes.torch, "Stream", Stream)
    monkeypatch.setattr(lanes.torch.accelerator, "current_stream", lambda device: Stream())
    worker = Threaded("embed", device, Timeline())
    job = worker.post(lambda: told.append("work") or tensor.as_subclass(Held), 0)
    assert isinstance(job.result(), Held)
    worker.close()
    assert told == ["enter", "work", "record", "main waits for event", "exit"] or told == [
        *("enter", "work", "record", "exit", "main waits for event")
    ]
    assert owned == ["main"]
