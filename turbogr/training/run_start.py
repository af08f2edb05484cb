"""What a run begins with, and the run folder around it: set up, held against others, its record kept to the end."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr.config import Config, dump_config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.files import replace_text
from turbogr.parallel.world import World
from turbogr.runs import RunFolder
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
            replace_text(run / "config.yaml", dump_config(start.config))
            replace_text(run / "environment.json", json.dumps(environment, indent=2) + "\n")
            _write_record(run, record, status="running")

        world.run_on_first(set_up)
        try:
            yield statuses.append
        finally:
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
    """Hold the run folder against a second trainer; the lock ends with the process, however it ends."""
    handle = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training in {run}; wait for it or choose another --out") from None
        yield
    finally:
        os.close(handle)


def _write_record(run: Path, record: dict[str, Any], *, status: str) -> None:
    record["status"] = status
    record["finished"] = None if status == "running" else now()
    replace_text(run / "run.json", json.dumps(record, indent=2) + "\n")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
