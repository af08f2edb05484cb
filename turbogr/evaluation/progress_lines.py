"""Lines that say how far long work has come, for logs and terminals where no progress bar is drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY = 30.0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class ProgressLines:
    """Says a line every `every` seconds of work, so work that is done sooner says nothing.

    `total` users are to be done; None is unknown. Without `shown` nothing is said, as on all ranks but one. `clock`
    gives the time in seconds.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        shown: bool = True,
        say: Callable[[str], None] = _to_stderr,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._every, self._clock = title, total, every, clock
        self._say = say if shown else None
        self._done, self._began = 0, clock()
        self._next = self._began + every

    def advance(self, num_users: int) -> None:
        """Count users that are done."""
        self._done += num_users
        self.tick()

    def tick(self) -> None:
        """Say a line if it is time; to be called often."""
        now = self._clock()
        if self._say is None or now < self._next:
            return
        self._next = now + self._every
        self._say(self._line(now - self._began))

    def watching(self, should_stop: Callable[[], bool] | None = None) -> Callable[[], bool]:
        """Return a `should_stop` that ticks whenever it is asked."""

        def ask() -> bool:
            self.tick()
            return should_stop is not None and should_stop()

        return ask

    def _line(self, seconds: float) -> str:
        if self._total is None:
            return f"{self._title}: {seconds:,.0f} s so far"
        left = ""
        if 0 < self._done <= self._total:
            left = f", about {seconds * (self._total - self._done) / self._done:,.0f} s left"
        return f"{self._title}: {self._done:,} of {self._total:,} users, {seconds:,.0f} s so far{left}"
