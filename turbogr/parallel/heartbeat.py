"""Heartbeats of the ranks, so that a rank that ends or hangs can be named.

A connection breaks when a process ends, but the error does not say which process; and a stopped process, or a machine
that is gone, breaks no connection. So a thread of every rank writes a heartbeat to the job's store once a second and
watches the heartbeat of the next rank. A heartbeat also holds the number of collectives that the rank has begun, so
that a rank that waits can say which other rank has not reached the same collective.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from turbogr.option_names import in_terms_of_caller

_INTERVAL_SECONDS = 1.0
_SILENT_INTERVALS = 4  # a running rank writes at least one heartbeat in this many intervals
_DONE = "done"

SILENT_RANK_STATUS = 75  # exit status of a process that ends because another rank sends no heartbeat


class Heartbeat:
    """The heartbeat of rank `rank` of `size`; `store` must be a connection that nothing else waits on.

    After `timeout` seconds (None: never) without a heartbeat of the next rank, `end` is called with a message, and on
    the other ranks with "". The same happens if the store does not answer for that long. Only time in which this
    process runs counts, so a machine that was suspended reports nobody. `store_host` describes the process that hosts
    the store; `hosts_store` is whether that is this process.
    """

    def __init__(
        self,
        store: Store,
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
        self._store, self._rank, self._size, self._end = store, rank, size, end or _end_process
        self._store_host, self._hosts_store = store_host, hosts_store
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_and_watch, daemon=True, name="heartbeat")
        self._num_answers = 0  # of the store

    def start(self) -> None:
        """Start the threads."""
        self._store.set(f"process-{self._rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._beat()
        self._thread.start()
        threading.Thread(target=self._watch_store, daemon=True, name="heartbeat-store").start()

    def count_collective(self) -> None:
        """Count a collective that this rank begins; any thread may call it."""
        with self._counting:
            self.num_collectives += 1

    def stop(self) -> None:
        """Stop, and tell the watching rank that the silence is intended."""
        self._stopped.set()
        self._thread.join(_SILENT_INTERVALS * _INTERVAL_SECONDS)
        if not self._thread.is_alive():  # else the store does not answer
            with suppress(RuntimeError):
                self._store.set(f"beat-{self._rank}", _DONE)

    def wait_for_others(self) -> None:
        """If this process hosts the store, wait up to two seconds until the other ranks have stopped too."""
        deadline = time.monotonic() + 2 * _INTERVAL_SECONDS
        with suppress(RuntimeError):
            while self._hosts_store and time.monotonic() < deadline and set(self._beats().values()) != {_DONE}:
                time.sleep(0.1 * _INTERVAL_SECONDS)

    def name_silent_ranks(self) -> str:
        """Stop; return the names of the ranks that send no heartbeat and did not stop, "" for none. Takes seconds."""
        self.stop()
        return self._describe(self._silent_ranks())

    def name_late_ranks(self) -> str:
        """Return the names of the ranks that have begun fewer collectives than this one, "" for none."""
        with suppress(RuntimeError):
            beats = {rank: beat for rank, beat in self._beats().items() if beat not in ("", _DONE)}
            return self._describe(rank for rank, beat in beats.items() if int(beat.split()[1]) < self.num_collectives)
        return ""

    def _beat_and_watch(self) -> None:
        watched, beat, silence = (self._rank + 1) % self._size, "", 0.0
        checked = time.monotonic()
        while not self._stopped.wait(_INTERVAL_SECONDS):
            try:
                self._beat()
                if self._read("silent"):
                    self._end("")
                    return
                latest = self._read(f"beat-{watched}")
                self._num_answers += 1
            except RuntimeError:
                return  # the host of the store has ended; the broken connections report that
            now = time.monotonic()
            alive = latest != beat or latest == _DONE
            silence = 0.0 if alive else silence + min(now - checked, 2 * _INTERVAL_SECONDS)
            beat, checked = latest, now
            if self.timeout is not None and silence > self.timeout and (names := self._describe(self._silent_ranks())):
                with suppress(RuntimeError):
                    self._store.set("silent", names)
                self._end(f"{names} has sent no heartbeat for {self.timeout:g} s (parallel.timeout)")
                return

    def _watch_store(self) -> None:
        """End when the other thread waits for the store too long: the store's own time limit does not always hold."""
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

    def _silent_ranks(self) -> list[int]:
        """Watch all heartbeats for a few seconds; return the ranks whose heartbeat does not change."""
        with suppress(RuntimeError):
            before = self._beats()
            for _ in range(_SILENT_INTERVALS):
                time.sleep(_INTERVAL_SECONDS)
                self._beat()
            after = self._beats()
            return [rank for rank in after if rank != self._rank and after[rank] == before[rank] != _DONE]
        return []

    def _beat(self) -> None:
        if not self._stopped.is_set():
            self._num_beats += 1
            self._store.set(f"beat-{self._rank}", f"{self._num_beats} {self.num_collectives}")

    def _beats(self) -> dict[int, str]:
        return {rank: self._read(f"beat-{rank}") for rank in range(self._size)}

    def _read(self, key: str) -> str:
        """Return the store's value of a key, "" if it has none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _describe(self, ranks: Iterable[int]) -> str:
        with suppress(RuntimeError):
            return ", ".join(f"rank {rank} ({self._read(f'process-{rank}')})" for rank in ranks)
        return ""


def _end_process(message: str) -> None:
    """End this process, whose main thread may be waiting for a message that never arrives."""
    if message:
        line = f"turbogr: error: {message}. The run continues from its last checkpoint with --resume"
        print(in_terms_of_caller(line), file=sys.stderr, flush=True)
    os._exit(SILENT_RANK_STATUS)
