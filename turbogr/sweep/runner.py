"""Runs the cells of a sweep as processes, a few at a time; finished runs are not run again.

A run that fails does not stop the others: the last line of its log is kept, and the next start of the sweep tries it
again. The first Ctrl-C or SIGTERM is passed on to the runs, which write their checkpoints and end; the next start
resumes them. No run continues without its sweep: a second signal ends the runs at once, and on Linux they also end when
the sweep is killed.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import torch

from turbogr import ops
from turbogr.accelerators import available_accelerator, choose_device
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.runs import RunFolder
from turbogr.sweep.grid import LOGS, Cell
from turbogr.sweep.run_folder import check_folder, config_of
from turbogr.sweep.run_process import RunProcess, ending
from turbogr.training.run_summary import read_summary
from turbogr.training.stopping import StopRequest

TRAIN = [sys.executable, "-m", "turbogr", "train"]

_POLL_SECONDS = 0.2


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
    running: list[_CellProcess] = []
    failed: dict[str, str] = {}
    number = skipped
    with StopRequest() as stop, ending(running):
        passed_on = False
        while running or (waiting and not stop):
            while waiting and len(running) < jobs and not stop:
                number += 1
                run = _CellProcess(waiting.pop(0), data, out, overrides, jobs, plugins)
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
                    report(f"{run.cell.name}  done in {run.seconds() / 60:.1f} min: {run.last_line()}")
            time.sleep(_POLL_SECONDS)
    return Outcome(failed, stop.signal)


class _CellProcess(RunProcess):
    """The run of a cell."""

    def __init__(
        self, cell: Cell, data: Path, out: Path, overrides: Sequence[str], jobs: int, plugins: Sequence[str]
    ) -> None:
        self.cell = cell
        command = [*TRAIN, str(cell.recipe), "--data", str(data)]
        command += ["--out", str(out / cell.name), "--resume"]
        command += [part for override in (*overrides, *cell.overrides) for part in ("--set", override)]
        command += [part for plugin in plugins for part in ("--plugins", plugin)]
        super().__init__(command, out / LOGS / f"{cell.name}.log", jobs=jobs)


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
    accelerator, count = available_accelerator(), torch.accelerator.device_count()
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
