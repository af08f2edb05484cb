"""What a run begins with, and the run folder around it: set up, held against others, its record kept to the end."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr.config import Config, dump_config
from turbogr.data.store import Store
from turbogr.errors import Note, UserError, warn_caller
from turbogr.file_locks import try_lock
from turbogr.files import remove_abandoned_files, replace_text
from turbogr.parallel.world import World
from turbogr.runs import RunFolder
from turbogr.training.resuming import LOCK_FILE
from turbogr.training.warm_start import WarmStart


@dataclass
class RunStart:
    """What a run begins with, before anything is written."""

    config: Config
    store: Store
    run: Path
    exists: bool
    warm_start: WarmStart | None
    record: dict[str, Any]
    changes: list[str]


@contextmanager
def held_folder(start: RunStart, environment: dict[str, Any], world: World) -> Iterator[Callable[[str], None]]:
    """Set the run folder up and hold it, on rank 0; yield what takes the status that the run ends with."""
    run, record = start.run, start.record
    statuses = ["failed"]
    if not world.is_first:
        world.run_on_first(_nothing)
        yield statuses.append
        return
    with ExitStack() as held:

        def set_up() -> None:
            run.mkdir(parents=True, exist_ok=True)
            held.enter_context(_alone_in(run))
            for folder in (run, run / "positions", run / "timeline"):
                remove_abandoned_files(folder)
            replace_text(run / "config.yaml", dump_config(start.config))
            replace_text(run / "environment.json", json.dumps(environment, indent=2) + "\n")
            _write_record(run, record, status="running")

        world.run_on_first(set_up)
        try:
            yield statuses.append
        except BaseException:
            with suppress(OSError):  # of a disk that is full, say; what ended the run is what the user must know
                _write_record(run, record, status=statuses[-1])
            raise
        _write_record(run, record, status=statuses[-1])


def _nothing() -> None:
    """What a rank does while rank 0 works."""


def keep_data(start: RunStart) -> None:
    """Copy the data into the run folder, and say so where it is not copied."""
    sentence = RunFolder.open(start.run).keep_data(start.store, start.config.train.copy_data)
    if sentence is not None:
        print(sentence, file=sys.stderr, flush=True)


@contextmanager
def _alone_in(run: Path) -> Iterator[None]:
    """Hold the run folder against a second trainer; the lock ends with the process, however it ends.

    A network file system may lock files and no folders; then a file inside is locked. It is never removed: another
    process may have opened it.
    """
    with ExitStack() as opened:
        locked = _lock(opened, run, os.O_RDONLY)
        if locked is None:
            locked = _lock(opened, run / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        if locked is None:
            warn_caller(
                f"the file system of {run} has no locks, so nothing keeps a second process from training there; start "
                "one at a time",
                Note,
            )
        if locked is False:
            raise UserError(f"another process is training in {run}; wait for it or choose another --out")
        yield


def _lock(opened: ExitStack, path: Path, flags: int) -> bool | None:
    """Open and lock a path until `opened` ends; the answers are those of `try_lock`."""
    try:
        handle = os.open(path, flags, 0o666)
    except OSError:
        return None  # what cannot be written is reported where it is
    opened.callback(os.close, handle)
    return try_lock(handle)


def _write_record(run: Path, record: dict[str, Any], *, status: str) -> None:
    record["status"] = status
    record["finished"] = None if status == "running" else now()
    replace_text(run / "run.json", json.dumps(record, indent=2) + "\n")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
