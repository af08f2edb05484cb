"""A training run as a process of its own: its log, how it ended, and that it ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM, Signals

from turbogr.machine import usable_cores

_C_LIBRARY = ctypes.CDLL(None)  # loaded here: between fork and exec little is safe
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@contextmanager
def ending(running: Sequence[RunProcess]) -> Iterator[None]:
    """End the runs if the block ends by an exception: they write checkpoints, unless they were signalled before."""
    try:
        yield
    except BaseException:
        for run in running:
            run.process.terminate()
        try:
            for run in running:
                run.process.wait()
        finally:
            for run in running:
                run.process.kill()
        raise


class RunProcess:
    """A command that trains, one of `jobs` at a time; its output is appended to `log`."""

    def __init__(self, command: list[str], log: Path, *, jobs: int = 1) -> None:
        self.log = log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs))} if jobs > 1 else {}
        with self.log.open("ab") as output:
            self._log_start = output.tell()  # earlier attempts wrote what is before it
            # A session of its own: Ctrl-C in a terminal then reaches the run only through us, once.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**threads, **os.environ},
                start_new_session=True,
                preexec_fn=_ends_with_its_parent,
            )

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def reason(self) -> str:
        """Return why the run failed: the signal that killed it, which is not in the log, else the log's last line."""
        if self.process.returncode >= 0:
            return self.last_line()
        name = _signal_name(-self.process.returncode)
        remedy = "; the system does that when memory runs out: try fewer --jobs or a smaller batch"
        return f"killed by {name}{remedy if name == 'SIGKILL' else ''}"

    def last_line(self) -> str:
        """Return the last line that this attempt wrote to the log, else how the process ended."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode("utf-8", errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else f"ended with status {self.process.returncode} and no message"


def _ends_with_its_parent() -> None:
    """In a new process: ask the system for a SIGTERM when the sweep has ended, for whatever reason.

    The signal comes once for every thread of a sweep that was killed, so the run may end while it writes its last
    checkpoint; the one before stays.
    """
    prctl = getattr(_C_LIBRARY, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(SIGTERM), 0, 0, 0)


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
