from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from turbogr.parallel import pulse
from turbogr.parallel.pulse import Pulse

HERE = f"process {os.getpid()} on {socket.gethostname()}"


class Job:
    """Three ranks in one process, and what each was ended with."""

    def __init__(self, seconds: float | None) -> None:
        store = dist.HashStore()
        self.told: list[list[str]] = [[], [], []]
        self.ranks = [Pulse(store, rank, 3, seconds, end=self.told[rank].append) for rank in range(3)]
        for rank in self.ranks:
            rank.start()

    def stop_beating(self, rank: int) -> None:
        """What SIGSTOP and SIGKILL do."""
        self.ranks[rank]._over.set()
        self.ranks[rank]._thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pulse, "_BEAT_SECONDS", 0.05)
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "a thread was left"
        time.sleep(0.01)


def test_a_silent_rank_is_named_by_its_watcher_and_ends_all() -> None:
    job = Job(seconds=0.3)
    time.sleep(0.6)
    assert job.told == [[], [], []]
    job.stop_beating(2)
    deadline = time.monotonic() + 20
    while not (job.told[0] and job.told[1]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert job.told == [[""], [f"rank 2 ({HERE}) has shown no sign of life for 0.3 s (parallel.timeout)"], []]


def test_a_rank_that_is_done_is_not_missed() -> None:
    job = Job(seconds=0.1)
    job.ranks[2].stop()
    time.sleep(1.0)
    assert job.told == [[], [], []]
    for rank in job.ranks[:2]:
        rank.stop()


def test_without_a_time_nobody_is_given_up_but_the_dead_are_named() -> None:
    job = Job(seconds=None)
    job.stop_beating(0)
    time.sleep(0.5)
    assert job.told == [[], [], []]
    assert job.ranks[1].gone() == f"rank 0 ({HERE})"
    assert job.ranks[2].gone() == f"rank 0 ({HERE})", "rank 1 has told that it ends"


def test_a_process_that_did_not_run_itself_misses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(seconds=5.0)
    job.stop_beating(2)
    now = time.monotonic
    for sleep in (1000.0, 2000.0):
        monkeypatch.setattr(pulse.time, "monotonic", lambda sleep=sleep: now() + sleep)
        time.sleep(0.3)
    assert job.told == [[], [], []]
    for rank in job.ranks[:2]:
        rank.stop()


class DeafStore:
    """A store that stops answering, as that of a stopped process does."""

    def __init__(self) -> None:
        self._store, self.answers = dist.HashStore(), threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        self.answers.wait()
        return getattr(self._store, name)


def test_a_store_that_does_not_answer_ends_the_rank() -> None:
    store, told = DeafStore(), []  # type: ignore[var-annotated]
    one = Pulse(store, 0, 1, 0.2, keeper="rank 0 on here", end=told.append)  # type: ignore[arg-type]
    one.start()
    time.sleep(0.3)
    assert told == []
    store.answers.clear()
    deadline = time.monotonic() + 20
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert told == ["rank 0 on here has not answered for 0.2 s (parallel.timeout)"]
    one.stop()
    store.answers.set()


def test_the_keeper_of_the_store_waits_for_the_others_to_end() -> None:
    store = dist.HashStore()
    ranks = [Pulse(store, rank, 2, None, keeps=rank == 0) for rank in range(2)]
    for rank in ranks:
        rank.start()
    threading.Timer(0.1, ranks[1].stop).start()
    started = time.monotonic()
    ranks[0].stop()
    ranks[0].linger()
    assert time.monotonic() - started > 0.08
    ranks[1].linger()


def test_who_has_not_come_is_named() -> None:
    job = Job(seconds=None)
    job.ranks[0].calls, job.ranks[1].calls, job.ranks[2].calls = 7, 7, 6
    time.sleep(0.5)
    assert job.ranks[0].behind() == f"rank 2 ({HERE})"
    assert job.ranks[2].behind() == ""
    for rank in job.ranks:
        rank.stop()
