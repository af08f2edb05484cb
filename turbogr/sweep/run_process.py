"""A training run as a process of its own: its log, how it ended, and that it ends with the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import Signals

from turbogr.machine import usable_cores

# A process that asks the system for a SIGTERM when its parent has ended, for whatever reason, and then becomes the
# command. It does that after it has been started: Python code between fork and exec may hang in a process with threads.
# The signal comes once for every thread of a parent that was killed, so the run may end while it writes its last
# checkpoint; the one before stays.
_ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
set_parent_death_signal = 1
ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this run has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


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
                _ending_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**threads, **os.environ},
                start_new_session=True,
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


def _ending_with_parent(command: list[str]) -> list[str]:
    """Return the command so that it ends when this process has ended; only Linux can do that."""
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid()), *command]


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
