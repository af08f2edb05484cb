"""Heartbeats of the ranks, so that a rank that ends or hangs can be named.

A connection breaks when a process ends, but the error does not say which process; and a stopped process, or a machine
that is gone, breaks no connection. So a thread of every rank writes a heartbeat to the job's store once a second and
watches the heartbeat of the next rank. A heartbeat also holds the number of collectives that the rank has begun, so
that a rank that waits can say which other rank has not reached the same collective.

An error of the store is no reason to end a job: the thread connects again, for as long as the job may be without its
store. The thread has to be gone before Python ends, so everything that it waits for can be interrupted.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from turbogr.option_names import in_terms_of_caller
from turbogr.parallel.store_connection import StoreConnection

_INTERVAL_SECONDS = 1.0
_SILENT_INTERVALS = 4  # a running rank writes at least one heartbeat in this many intervals
_FIRST_RETRY, _LONGEST_RETRY = 0.25, 2.0  # intervals between attempts to reach the store; each is twice the last
_DONE = "done"

SILENT_RANK_STATUS = 75  # exit status of a process that ends because another rank sends no heartbeat


class Heartbeat:
    """The heartbeat of rank `rank` of `size`, over a connection to the store that nothing else uses.

    After `timeout` seconds (None: never) without a heartbeat of the next rank, `end` is called with a message, and on
    the other ranks with "". The same happens if the store does not answer for that long; until then, errors of the
    store are followed by new attempts. Only time in which this process runs counts, so a machine that was suspended
    reports nobody. `store_host` describes the process that hosts the store; `hosts_store` is whether that is this
    process.
    """

    def __init__(
        self,
        connection: StoreConnection,
        rank: int,
        size: int,
        timeout: float | None,
        *,
        store_host: str = "the process that hosts the store",
        hosts_store: bool = False,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.timeout, self.num_collectives, self._num_beats = timeout, 0, 0
        self._counting = threading.Lock()
        self._connection, self._rank, self._size, self._end = connection, rank, size, end or end_process
        self._store_host, self._hosts_store = store_host, hosts_store
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_and_watch, daemon=True, name="heartbeat")
        self._store_thread = threading.Thread(target=self._watch_store, daemon=True, name="heartbeat-store")
        self._num_answers = 0  # of the store

    def start(self) -> None:
        """Start the threads.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        self._set(f"process-{self._rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._beat()
        self._thread.start()
        self._store_thread.start()

    def count_collective(self) -> None:
        """Count a collective that this rank begins; any thread may call it."""
        with self._counting:
            self.num_collectives += 1

    def stop(self) -> None:
        """End the threads, and tell the watching rank that the silence is intended."""
        self._stopped.set()
        with self._limited(_SILENT_INTERVALS):
            for thread in (self._thread, self._store_thread):
                if thread.ident is not None:
                    thread.join(3 * _SILENT_INTERVALS * _INTERVAL_SECONDS)
            with suppress(RuntimeError):
                self._set(f"beat-{self._rank}", _DONE)

    def wait_for_others(self) -> None:
        """If this process hosts the store, wait up to two seconds until the other ranks have stopped too."""
        deadline = time.monotonic() + 2 * _INTERVAL_SECONDS
        with suppress(RuntimeError), self._limited(_SILENT_INTERVALS):
            while self._hosts_store and time.monotonic() < deadline and set(self._beats().values()) != {_DONE}:
                time.sleep(0.1 * _INTERVAL_SECONDS)

    def name_silent_ranks(self) -> str:
        """Stop; return the names of the ranks that send no heartbeat and did not stop, "" for none. Takes seconds."""
        self.stop()
        with suppress(RuntimeError), self._limited(3 * _SILENT_INTERVALS):
            return self._describe(self._silent_ranks(time.sleep))
        return ""

    def name_late_ranks(self) -> str:
        """Return the names of the ranks that have begun fewer collectives than this one, "" for none."""
        with suppress(RuntimeError), self._limited(_SILENT_INTERVALS):
            beats = {rank: beat for rank, beat in self._beats().items() if beat not in ("", _DONE)}
            return self._describe(rank for rank, beat in beats.items() if int(beat.split()[1]) < self.num_collectives)
        return ""

    @contextmanager
    def _limited(self, intervals: float) -> Iterator[None]:
        """Make all calls of the store fail if the block takes longer than so many intervals."""
        over = threading.Event()

        def give_up() -> None:
            wait = intervals
            while not over.wait(wait * _INTERVAL_SECONDS):
                wait = _FIRST_RETRY
                self._connection.close() if self._stopped.is_set() else self._connection.interrupt()

        watching = threading.Thread(target=give_up, daemon=True, name="heartbeat-limit")
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()

    def _beat_and_watch(self) -> None:
        watched, beat, silence = (self._rank + 1) % self._size, "", 0.0
        checked, retry = time.monotonic(), 0.0  # retry: intervals to wait after an error, 0 after none
        while not self._stopped.wait((retry or 1.0) * _INTERVAL_SECONDS):
            try:
                self._beat()
                if self._read("silent"):
                    self._end("")
                    return
                latest = self._read(f"beat-{watched}")
                self._num_answers += 1
                now = time.monotonic()
                alive = latest != beat or latest == _DONE
                silence = 0.0 if alive else silence + min(now - checked, 2 * _INTERVAL_SECONDS)
                beat, checked = latest, now
                if self.timeout is not None and silence > self.timeout:
                    names = self._describe(self._silent_ranks(self._stopped.wait))
                    if names and not self._stopped.is_set():
                        self._set("silent", names)
                        self._end(f"{names} has sent no heartbeat for {self.timeout:g} s (parallel.timeout)")
                        return
                retry = 0.0
            except RuntimeError:
                self._connection.drop()
                retry = min(2 * retry or _FIRST_RETRY, _LONGEST_RETRY)

    def _watch_store(self) -> None:
        """End when the other thread has no answer of the store for too long."""
        num_answers, silence = 0, 0.0
        checked = time.monotonic()
        while self._thread.is_alive() and not self._stopped.wait(_INTERVAL_SECONDS):
            now = time.monotonic()
            answered = self._num_answers != num_answers
            silence = 0.0 if answered else silence + min(now - checked, 2 * _INTERVAL_SECONDS)
            num_answers, checked = self._num_answers, now
            if self.timeout is not None and silence > self.timeout + 2 * _SILENT_INTERVALS * _INTERVAL_SECONDS:
                self._end(f"{self._store_host} has not answered for {self.timeout:g} s (parallel.timeout)")
                return

    def _silent_ranks(self, pause: Callable[[float], object]) -> list[int]:
        """Watch all heartbeats for a few intervals; return the ranks whose heartbeat does not change."""
        before = self._beats()
        for _ in range(_SILENT_INTERVALS):
            if pause(_INTERVAL_SECONDS):  # stopped meanwhile
                return []
            self._beat()
        after = self._beats()
        return [rank for rank in after if rank != self._rank and after[rank] == before[rank] != _DONE]

    def _beat(self) -> None:
        if not self._stopped.is_set():
            self._num_beats += 1
            self._set(f"beat-{self._rank}", f"{self._num_beats} {self.num_collectives}")

    def _beats(self) -> dict[int, str]:
        return {rank: self._read(f"beat-{rank}") for rank in range(self._size)}

    def _set(self, key: str, value: str) -> None:
        self._connection.store().set(key, value)

    def _read(self, key: str) -> str:
        """Return the store's value of a key, "" if it has none."""
        store = self._connection.store()
        return store.get(key).decode() if store.check([key]) else ""

    def _describe(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} ({self._read(f'process-{rank}')})" for rank in ranks)


def end_process(message: str) -> None:
    """End this process, whose main thread may be waiting for a message that never arrives."""
    if message:
        line = f"turbogr: error: {message}. The run continues from its last checkpoint with --resume"
        print(in_terms_of_caller(line), file=sys.stderr, flush=True)
    os._exit(SILENT_RANK_STATUS)
