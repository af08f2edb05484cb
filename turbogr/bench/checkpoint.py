"""How long training waits for a checkpoint that is written in the background, against one that it waits for.

Claim: the pause is a small share of a blocking save, and the checksum costs less than the disk.
Compared with: the same save, blocking.
Keys: `pause_share`, the pause over a blocking save; `first_pause_share`, of a first save that makes the buffers;
`prepared_pause_share`, of a first save whose buffers were made before, in `preparing_seconds`; `pause_seconds`,
`blocking_seconds`; `crc32_gb_per_second` and the same of `blake2b` and `sha256`, on one core.

A save copies the tensors of the state, and a thread writes the copy with its checksums and flushes it. The pause is the
time until training may change the tensors. Blocking and background saves run in turns. A run makes the buffers in a
thread after its first step; here nothing else runs meanwhile. `folder` is where checkpoints are written; on a file
system in memory a blocking save is faster and the share larger.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from turbogr.bench.record import Result, Table
from turbogr.checkpoints import Checkpoints
from turbogr.errors import UserError
from turbogr.progress import Progress

SETTINGS: dict[str, Any] = {
    "megabytes": 1000,  # of the whole state
    "tensors": 3,  # as weights and two moments
    "repeats": 5,
    "folder": "",  # where checkpoints are written; the system's folder for temporary files
}

_HASHED = 64 << 20  # bytes


def run(settings: Mapping[str, Any]) -> Result:
    """Time saves of both kinds.

    Raises:
        UserError: settings that are not positive.
    """
    if min(settings["megabytes"], settings["tensors"], settings["repeats"]) < 1:
        raise UserError("megabytes, tensors and repeats must be at least 1")
    rows = settings["megabytes"] * 1_000_000 // (settings["tensors"] * 256)
    state = {"tables": {f"t{n}": torch.randn(rows, 64) for n in range(settings["tensors"])}}
    with tempfile.TemporaryDirectory(dir=settings["folder"] or None) as folder:
        blocking, pauses = _in_turns(state, Path(folder), settings["repeats"])
        preparing, prepared = _prepared(state, Path(folder, "prepared"))
    speeds = {name: _HASHED / _seconds(hashed) / 1e9 for name, hashed in _hashes().items()}
    figures = {
        "pause_share": median(pauses[1:]) / median(blocking),
        "first_pause_share": pauses[0] / median(blocking),
        "prepared_pause_share": prepared / median(blocking),
        "preparing_seconds": preparing,
        "pause_seconds": median(pauses[1:]),
        "blocking_seconds": median(blocking),
        **{f"{name}_gb_per_second": speed for name, speed in speeds.items()},
    }
    table = Table(
        f"a state of {settings['megabytes']:,} MB",
        ["what", "seconds", "of a blocking save"],
        [
            ["blocking save", figures["blocking_seconds"], 1.0],
            ["pause of a save in the background", figures["pause_seconds"], figures["pause_share"]],
            ["pause of a first one that makes the buffers", pauses[0], figures["first_pause_share"]],
            ["pause of a first one whose buffers are made", prepared, figures["prepared_pause_share"]],
        ],
    )
    return Result(figures, [table])


def _in_turns(state: dict[str, Any], folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of blocking saves, and of the pauses of saves in the background, the first one included."""
    checkpoints, step = Checkpoints(folder, keep=1), 0
    blocking: list[float] = []
    pauses: list[float] = []
    for number in range(repeats + 1):
        for background in (True, False) if number else (True,):
            step += 1
            start = time.perf_counter()
            checkpoints.save(state, Progress(step=step), background=background)
            (pauses if background else blocking).append(time.perf_counter() - start)
            checkpoints.finish()
    return blocking, pauses


def _prepared(state: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Seconds in which a thread makes the buffers, and of the pause of a first save after that."""
    checkpoints = Checkpoints(folder, keep=1)
    start = time.perf_counter()
    checkpoints.prepare(state)
    checkpoints.wait_until_prepared()
    done = time.perf_counter()
    checkpoints.save(state, Progress(step=1), background=True)
    pause = time.perf_counter() - done
    checkpoints.finish()
    return done - start, pause


def _hashes() -> dict[str, Callable[[bytes], Any]]:
    return {
        "crc32": zlib.crc32,
        "blake2b": lambda data: hashlib.blake2b(data).digest(),
        "sha256": lambda data: hashlib.sha256(data).digest(),
    }


def _seconds(hashed: Callable[[bytes], Any]) -> float:
    """The fastest of three passes, in time of this thread: other programs do not count."""
    data, times = torch.randint(256, (_HASHED,), dtype=torch.uint8).numpy().tobytes(), []
    for _ in range(3):
        start = time.thread_time()
        hashed(data)
        times.append(time.thread_time() - start)
    return min(times)
