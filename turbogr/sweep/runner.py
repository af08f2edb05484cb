"""Runs the cells of a sweep as processes, a few at a time; finished runs are not run again.

A run that fails does not stop the others: the last line of its log is kept, and the next start of the sweep tries it
again. The first Ctrl-C or SIGTERM is passed on to the runs, which write their checkpoints and end; the next start
resumes them. No run continues without its sweep: a second signal ends the runs at once, and on Linux they also end when
the sweep is killed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals

import torch

from turbogr import ops
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.machine import usable_cores
from turbogr.runs import RunFolder
from turbogr.sweep.grid import LOGS, Cell
from turbogr.sweep.run_folder import check_folder, config_of
from turbogr.training.run_summary import read_summary
from turbogr.training.stopping import StopRequest
from turbogr.training.trainer import choose_device

TRAIN = [sys.executable, "-m", "turbogr", "train"]

_POLL_SECONDS = 0.2
_C_LIBRARY = ctypes.CDLL(None)  # loaded here: between fork and exec little is safe
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep: names of the runs that failed, with the reasons, and the signal that stopped it."""

    failed: dict[str, str]
    signal: Signals | None


def sweep(
    cells: Sequence[Cell],
    data: Path,
    out: Path,
    *,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    plugins: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> Outcome:
    """Train every cell into `out/<name of the cell>`, `jobs` at a time; the cores are divided among them.

    Raises:
        UserError: as `check`, before the first run starts.
    """
    waiting = check(cells, data, out, overrides, jobs=jobs)
    skipped = len(cells) - len(waiting)
    if skipped:
        report(f"{skipped} of {len(cells)} runs are finished already")
    running: list[_RunProcess] = []
    failed: dict[str, str] = {}
    number = skipped
    with StopRequest() as stop, _ending(running):
        passed_on = False
        while running or (waiting and not stop):
            while waiting and len(running) < jobs and not stop:
                number += 1
                run = _RunProcess(waiting.pop(0), data, out, overrides, jobs, plugins)
                report(f"[{number}/{len(cells)}] {run.cell.name}  starts; its output goes to {run.log}")
                running.append(run)
            if stop.signal is not None and not passed_on:
                passed_on = True
                for run in running:
                    run.process.send_signal(stop.signal)
                report(f"stopping: {len(running)} runs write their checkpoints")
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                if run.process.returncode and not stop:
                    failed[run.cell.name] = run.reason()
                    report(f"{run.cell.name}  failed: {failed[run.cell.name]}")
                elif not stop:
                    report(f"{run.cell.name}  done in {run.minutes():.1f} min: {run.last_line()}")
            time.sleep(_POLL_SECONDS)
    return Outcome(failed, stop.signal)


@contextmanager
def _ending(running: Sequence[_RunProcess]) -> Iterator[None]:
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


class _RunProcess:
    def __init__(
        self, cell: Cell, data: Path, out: Path, overrides: Sequence[str], jobs: int, plugins: Sequence[str]
    ) -> None:
        self.cell = cell
        self.log = out / LOGS / f"{cell.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        command = [*TRAIN, str(cell.recipe), "--data", str(data)]
        command += ["--out", str(out / cell.name), "--resume"]
        command += [part for override in (*overrides, *cell.overrides) for part in ("--set", override)]
        command += [part for plugin in plugins for part in ("--plugins", plugin)]
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs))} if jobs > 1 else {}
        with self.log.open("ab") as log:
            self._log_start = log.tell()  # earlier attempts wrote what is before it
            # A session of its own: Ctrl-C in a terminal then reaches the run only through us, once.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**threads, **os.environ},
                start_new_session=True,
                preexec_fn=_ends_with_its_parent,
            )

    def minutes(self) -> float:
        return (time.monotonic() - self._started) / 60

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


def check(cells: Sequence[Cell], data: Path, out: Path, overrides: Sequence[str] = (), *, jobs: int = 1) -> list[Cell]:
    """Check everything that a sweep needs; return the cells that are not finished with their settings.

    Raises:
        UserError: no jobs, a recipe, setting or store that cannot be trained here, or a cell's folder has something
            else in it than the cell's run.
    """
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; give at least 1")
    store = Store.open(data)
    waiting = []
    for cell in cells:
        config = config_of(cell, store, out, overrides)
        _check_machine(config)
        check_folder(cell, out, config, store)
        if not _is_finished(out / cell.name, config):
            waiting.append(cell)
    return waiting


def _check_machine(config: Config) -> None:
    """Raise the UserError of a device or backend that this machine does not have.

    An accelerator that exists is not used: memory that the sweep took would be missing for its runs.
    """
    with ops.backend(config.train.backend):
        pass
    accelerator, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    usable = {"auto", "cpu"}
    if accelerator is not None and count:
        usable |= {accelerator.type, *(f"{accelerator.type}:{number}" for number in range(count))}
    if config.train.device not in usable:
        choose_device(config.train.device)


def _is_finished(run: Path, config: Config) -> bool:
    """Return whether a run has ended with this config."""
    if read_summary(run) is None:
        return False
    folder = RunFolder.open(run)
    if folder.record["status"] in ("running", "interrupted", "failed"):
        return False
    before = folder.config()
    return before == dataclasses.replace(config, parallel=before.parallel, plugins=before.plugins)
