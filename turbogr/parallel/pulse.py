"""Signs of life of the ranks, so that one that dies or hangs can be named.

Connections break when a process dies, but they do not say which; and one that is stopped, or whose machine is gone,
breaks none. So a thread of every rank beats in the job's store once a second and watches the beats of the next rank.
A beat also counts the collectives that the rank has begun: whoever waits in vain can say who has not come.
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

_BEAT_SECONDS = 1.0
_MISSED = 4  # beats that a rank which lives does not miss
_DONE = "done"

ENDED_STATUS = 75  # of a process that ended because another rank was silent


class Pulse:
    """The beats of rank `rank` of `size`; `store` must be a connection that nothing else waits on.

    After `seconds` without a beat of the next rank (None: never), `end` is called with a message, and on the other
    ranks with ""; so it is when the store does not answer for as long. Time counts while this process runs: a machine
    that was asleep has lost nobody. `keeper` is who keeps the store, in words; `keeps` whether it is this process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        seconds: float | None,
        *,
        keeper: str = "the process that keeps the store",
        keeps: bool = False,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.seconds, self.calls, self._ticks = seconds, 0, 0
        self._counting = threading.Lock()
        self._store, self._rank, self._size, self._end = store, rank, size, end or _end_process
        self._keeper, self._keeps = keeper, keeps
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True, name="pulse")
        self._answers = 0

    def start(self) -> None:
        """Begin to beat."""
        self._store.set(f"who-{self._rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._beat()
        self._thread.start()
        threading.Thread(target=self._watch_store, daemon=True, name="pulse-store").start()

    def count_call(self) -> None:
        """Note that this rank begins a collective, in whichever thread."""
        with self._counting:
            self.calls += 1

    def stop(self) -> None:
        """Say that this rank ends as it should, or knows of a rank that does not."""
        self._over.set()
        self._thread.join(_MISSED * _BEAT_SECONDS)
        if not self._thread.is_alive():  # else the store does not answer
            with suppress(RuntimeError):
                self._store.set(f"beat-{self._rank}", _DONE)

    def linger(self) -> None:
        """Let the others say so too, for a moment, before the store goes with this process."""
        deadline = time.monotonic() + 2 * _BEAT_SECONDS
        with suppress(RuntimeError):
            while self._keeps and time.monotonic() < deadline and set(self._beats().values()) != {_DONE}:
                time.sleep(0.1 * _BEAT_SECONDS)

    def gone(self) -> str:
        """Name the ranks that have stopped beating without a word, "" for none; takes some seconds."""
        self.stop()
        return self._named(self._silent())

    def behind(self) -> str:
        """Name the ranks that have begun fewer collectives than this one, "" for none."""
        with suppress(RuntimeError):
            beats = {rank: beat for rank, beat in self._beats().items() if beat not in ("", _DONE)}
            return self._named(rank for rank, beat in beats.items() if int(beat.split()[1]) < self.calls)
        return ""

    def _live(self) -> None:
        watched, beat, quiet = (self._rank + 1) % self._size, "", 0.0
        looked = time.monotonic()
        while not self._over.wait(_BEAT_SECONDS):
            try:
                self._beat()
                if self._read("silent"):
                    self._end("")
                    return
                latest = self._read(f"beat-{watched}")
                self._answers += 1
            except RuntimeError:
                return  # who keeps the store has ended, and connections tell of that
            now = time.monotonic()
            quiet = 0.0 if latest != beat or latest == _DONE else quiet + min(now - looked, 2 * _BEAT_SECONDS)
            beat, looked = latest, now
            if self.seconds is not None and quiet > self.seconds and (silent := self._named(self._silent())):
                with suppress(RuntimeError):
                    self._store.set("silent", silent)
                self._end(f"{silent} has shown no sign of life for {self.seconds:g} s (parallel.timeout)")
                return

    def _watch_store(self) -> None:
        """End when the other thread waits for the store in vain: it has no time limit that holds."""
        answers, quiet = 0, 0.0
        looked = time.monotonic()
        while self._thread.is_alive() and not self._over.wait(_BEAT_SECONDS):
            now = time.monotonic()
            quiet = 0.0 if self._answers != answers else quiet + min(now - looked, 2 * _BEAT_SECONDS)
            answers, looked = self._answers, now
            if self.seconds is not None and quiet > self.seconds + 2 * _MISSED * _BEAT_SECONDS:
                self._end(f"{self._keeper} has not answered for {self.seconds:g} s (parallel.timeout)")
                return

    def _silent(self) -> list[int]:
        """Ranks whose beats stand still."""
        with suppress(RuntimeError):
            before = self._beats()
            for _ in range(_MISSED):
                time.sleep(_BEAT_SECONDS)
                self._beat()
            after = self._beats()
            return [rank for rank in after if rank != self._rank and after[rank] == before[rank] != _DONE]
        return []

    def _beat(self) -> None:
        if not self._over.is_set():
            self._ticks += 1
            self._store.set(f"beat-{self._rank}", f"{self._ticks} {self.calls}")

    def _beats(self) -> dict[int, str]:
        return {rank: self._read(f"beat-{rank}") for rank in range(self._size)}

    def _read(self, name: str) -> str:
        """What the store has under a name, "" for nothing."""
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def _named(self, ranks: Iterable[int]) -> str:
        with suppress(RuntimeError):
            return ", ".join(f"rank {rank} ({self._read(f'who-{rank}')})" for rank in ranks)
        return ""


def _end_process(message: str) -> None:
    """End this process, whose main thread may wait for an answer that never comes."""
    if message:
        told = f"turbogr: error: {message}. The run continues from its last checkpoint with --resume"
        print(told, file=sys.stderr, flush=True)
    os._exit(ENDED_STATUS)
