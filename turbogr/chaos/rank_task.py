"""What the process that watches a job and the ranks of the job share; it does not import torch.

The watching process forks nothing itself: a server that has imported torch once forks the ranks.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class RankTask:
    """A rank of a life.

    `bad` are the values that are not finite: kind, step from 0, and rank. With `left_out` steps (from 1) this is the
    undisturbed job, which leaves their updates out.
    """

    life: int
    rank: int
    ranks: int
    port: int
    arguments: tuple[str, ...]
    board: str
    log: str
    trajectory: str
    bad: tuple[tuple[str, int, int], ...] = ()
    left_out: tuple[int, ...] = ()


class Board:
    """Shared memory with the state of every rank: steps done, step that its life began with; -1 before training."""

    def __init__(self, path: str, ranks: int, *, new: bool = False) -> None:
        if new:
            Path(path).write_bytes(struct.pack("q", -1) * 2 * ranks)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 16 * ranks)

    def write(self, rank: int, steps: int, begun_with: int | None = None) -> None:
        struct.pack_into("q", self._memory, 16 * rank, steps)
        if begun_with is not None:
            struct.pack_into("q", self._memory, 16 * rank + 8, begun_with)

    def steps(self, rank: int = 0) -> int:
        return int(struct.unpack_from("q", self._memory, 16 * rank)[0])

    def begun_with(self, rank: int = 0) -> int:
        return int(struct.unpack_from("q", self._memory, 16 * rank + 8)[0])

    def clear(self, ranks: int) -> None:
        for rank in range(ranks):
            self.write(rank, -1, -1)


def start_rank(task: RankTask) -> BaseProcess:
    """Start a rank."""
    return _start(_run_rank, task)


def start_preparing(folder: Path, num_users: int, log: Path, facts: Path) -> BaseProcess:
    """Start a process that prepares the data of all jobs, the first one of the server."""
    # Killed ranks leave semaphores, of which Python's tracker would warn in the end.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"
    needed = ["torch._dynamo", "turbogr.chaos.rank_under_faults", "turbogr.cli", "turbogr.commands.train"]
    _context.set_forkserver_preload(needed)
    return _start(_prepare_data, str(folder), num_users, str(log), str(facts))


def _start(function: Callable[..., None], *args: Any) -> BaseProcess:
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _run_rank(task: RankTask) -> None:
    from turbogr.chaos.rank_under_faults import run_rank

    run_rank(task)


def _prepare_data(*args: Any) -> None:
    from turbogr.chaos.rank_under_faults import prepare_data

    prepare_data(*args)
