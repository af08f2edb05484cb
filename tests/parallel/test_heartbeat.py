from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from turbogr.parallel import heartbeat
from turbogr.parallel.heartbeat import Heartbeat
from turbogr.parallel.store_connection import StoreConnection

HERE = f"process {os.getpid()} on {socket.gethostname()}"


def to(store: Any) -> StoreConnection:
    return StoreConnection(lambda seconds: store)


class Job:
    """Three ranks in one process, and the message with which each was ended."""

    def __init__(self, timeout: float | None) -> None:
        store = dist.HashStore()
        self.messages: list[list[str]] = [[], [], []]
        self.ranks = [Heartbeat(to(store), rank, 3, timeout, end=self.messages[rank].append) for rank in range(3)]
        for rank in self.ranks:
            rank.start()

    def stop_beating(self, rank: int) -> None:
        """As SIGSTOP and SIGKILL do."""
        self.ranks[rank]._stopped.set()
        self.ranks[rank]._thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heartbeat, "_INTERVAL_SECONDS", 0.05)
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "a thread was left"
        time.sleep(0.01)


def test_a_silent_rank_is_named_by_its_watcher_and_ends_all() -> None:
    job = Job(timeout=0.3)
    time.sleep(0.6)
    assert job.messages == [[], [], []]
    job.stop_beating(2)
    deadline = time.monotonic() + 20
    while not (job.messages[0] and job.messages[1]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert job.messages == [[""], [f"rank 2 ({HERE}) has sent no heartbeat for 0.3 s (parallel.timeout)"], []]


def test_a_rank_that_has_stopped_is_not_reported() -> None:
    job = Job(timeout=0.1)
    job.ranks[2].stop()
    time.sleep(1.0)
    assert job.messages == [[], [], []]
    for rank in job.ranks[:2]:
        rank.stop()


def test_without_a_timeout_nothing_ends_but_silent_ranks_can_be_named() -> None:
    job = Job(timeout=None)
    job.stop_beating(0)
    time.sleep(0.5)
    assert job.messages == [[], [], []]
    assert job.ranks[1].name_silent_ranks() == f"rank 0 ({HERE})"
    assert job.ranks[2].name_silent_ranks() == f"rank 0 ({HERE})", "rank 1 has stopped on purpose"


def test_time_in_which_the_process_itself_was_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(timeout=5.0)
    job.stop_beating(2)
    now = time.monotonic
    for sleep in (1000.0, 2000.0):
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda sleep=sleep: now() + sleep)
        time.sleep(0.3)
    assert job.messages == [[], [], []]
    for rank in job.ranks[:2]:
        rank.stop()


class UnresponsiveStore:
    """A store that stops answering, like that of a stopped process."""

    def __init__(self) -> None:
        self._store, self.answers = dist.HashStore(), threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        self.answers.wait()
        return getattr(self._store, name)


def test_a_store_that_does_not_answer_ends_the_rank() -> None:
    store, messages = UnresponsiveStore(), []  # type: ignore[var-annotated]
    one = Heartbeat(to(store), 0, 1, 0.2, store_host="rank 0 on here", end=messages.append)
    one.start()
    time.sleep(0.3)
    assert messages == []
    store.answers.clear()
    deadline = time.monotonic() + 20
    while not messages:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert messages == ["rank 0 on here has not answered for 0.2 s (parallel.timeout)"]
    one.stop()
    store.answers.set()


def test_the_host_of_the_store_waits_for_the_others_to_end() -> None:
    store = dist.HashStore()
    ranks = [Heartbeat(to(store), rank, 2, None, hosts_store=rank == 0) for rank in range(2)]
    for rank in ranks:
        rank.start()
    threading.Timer(0.1, ranks[1].stop).start()
    started = time.monotonic()
    ranks[0].stop()
    ranks[0].wait_for_others()
    assert time.monotonic() - started > 0.08
    ranks[1].wait_for_others()


def test_late_ranks_are_named() -> None:
    job = Job(timeout=None)
    job.ranks[0].num_collectives, job.ranks[1].num_collectives, job.ranks[2].num_collectives = 7, 7, 6
    time.sleep(0.5)
    assert job.ranks[0].name_late_ranks() == f"rank 2 ({HERE})"
    assert job.ranks[2].name_late_ranks() == ""
    for rank in job.ranks:
        rank.stop()


class FailingStore:
    """A store all of whose calls fail as long as `fails` is set."""

    def __init__(self, store: dist.HashStore) -> None:
        self._store, self.fails, self.failures = store, False, 0

    def __getattr__(self, name: str) -> Any:
        if self.fails:
            self.failures += 1
            raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self._store, name)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_store_that_fails_for_a_while_ends_nothing() -> None:
    store = FailingStore(dist.HashStore())
    messages: list[list[str]] = [[], []]
    ranks = [Heartbeat(to(store), rank, 2, 0.4, end=messages[rank].append) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for _ in range(3):
        store.fails, before = True, store.failures
        wait_until(lambda before=before: store.failures > before + 2)  # type: ignore[misc]
        store.fails = False
        beats = [rank._num_answers for rank in ranks]
        wait_until(lambda beats=beats: all(rank._num_answers > old for rank, old in zip(ranks, beats, strict=True)))  # type: ignore[misc]
    time.sleep(0.6)  # longer than the time-out: both still send heartbeats
    assert messages == [[], []]
    for rank in ranks:
        rank.stop()


def test_a_store_that_fails_for_ever_ends_the_rank() -> None:
    store, messages = FailingStore(dist.HashStore()), []  # type: ignore[var-annotated]
    one = Heartbeat(to(store), 0, 1, 0.2, store_host="rank 0 on here", end=messages.append)
    one.start()
    store.fails = True
    wait_until(lambda: bool(messages))
    assert messages == ["rank 0 on here has not answered for 0.2 s (parallel.timeout)"]
    one.stop()


def test_an_interrupted_connection_is_opened_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    opened = []

    def connect(seconds: float) -> dist.TCPStore:
        opened.append(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False))
        return opened[-1]

    messages: list[str] = []
    connection = StoreConnection(connect, server.port)
    one = Heartbeat(connection, 0, 1, 5.0, end=messages.append)
    one.start()
    wait_until(lambda: one._num_answers > 0)
    connection.interrupt()
    wait_until(lambda: len(opened) > 1)
    beats = one._num_answers
    wait_until(lambda: one._num_answers > beats)
    one.stop()
    assert server.get("beat-0") == b"done" and messages == []


def host_store(port: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(server.port)
    signal.pause()


def test_no_thread_waits_for_a_store_after_the_stop() -> None:
    """A thread that is still inside the store when Python ends makes the process abort."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=host_store, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()

    def connect(seconds: float) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=seconds))

    one = Heartbeat(StoreConnection(connect, port), 0, 1, None)
    one.start()
    assert process.pid is not None
    try:
        os.kill(process.pid, signal.SIGSTOP)
        answers = -1
        while one._num_answers != answers:  # until the thread waits for an answer
            answers = one._num_answers
            time.sleep(0.2)
        one.stop()
        assert not one._thread.is_alive() and not one._store_thread.is_alive()
        assert one.name_silent_ranks() == "" and one.name_late_ranks() == ""
    finally:
        process.kill()


def test_the_search_for_silent_ranks_ends_with_the_stop() -> None:
    store = dist.HashStore()
    searching, silent = (Heartbeat(to(store), rank, 2, None) for rank in range(2))
    for rank in (searching, silent):
        rank._beat()
    assert searching._silent_ranks(lambda seconds: None) == [1], "the search would find it"
    searching._stopped.set()
    assert searching._silent_ranks(searching._stopped.wait) == []
