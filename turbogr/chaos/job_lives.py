"""One job under faults: it is started, met by a fault, resumed, until it is done; what was lost on the way."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from turbogr.chaos.fault_plan import ENDING, Fault, JobPlan
from turbogr.chaos.rank_task import Board, RankTask, start_rank
from turbogr.chaos.surroundings import Disk, Link

HANG_SECONDS = 180.0
"""A life that makes no step for so long, or does not end after a fault that ends it, hangs."""

_POLL_SECONDS = 0.003
_AGENT_SECONDS = 0.1  # after which torchrun's agent stops the ranks that are left when one has failed
_FAULTLESS_LIVES = 3  # that may end without success and without a fault before a job is given up
_SIGTERM_STATUS, _ERROR_STATUS = 128 + signal.SIGTERM, 2


@dataclass
class JobResult:
    """What became of a job. `struck`: a record per fault that has struck; `problems`: what should not be."""

    lives: int = 0
    struck: list[dict[str, Any]] = field(default_factory=list)
    lost_checkpoint_steps: int = 0
    hangs: int = 0
    from_survivors: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class _Life:
    """A life under way: `pending` is the fault that waits to strike next, with the time from which it may."""

    number: int
    processes: list[BaseProcess]
    started: float
    moved: float
    steps: int = -1
    due: float | None = None
    ending: dict[str, Any] | None = None
    slow_until: float | None = None
    slow: dict[str, Any] | None = None
    failed_at: float | None = None
    stopped: bool = False
    hangs: bool = False


class JobUnderFaults:
    """A job in the folder `folder`, whose run is on `disk`; `data` is its store."""

    def __init__(self, plan: JobPlan, folder: Path, disk: Disk, link: Link, data: Path) -> None:
        self.plan, self._folder, self._disk, self._link, self._data = plan, folder, disk, link, data
        self.run = disk.folder / f"job-{plan.number}"
        self._board = Board(str(folder / "board"), plan.ranks, new=True)
        self._waiting = [fault for fault in plan.faults if fault.kind != "nan"]
        self.result = JobResult()

    def live(self) -> JobResult:
        """Let the job live until it is done."""
        faultless = 0
        while True:
            self.result.lives += 1
            num_struck, newest = len(self.result.struck), self._newest_checkpoint()
            life = self._start_life(self.result.lives)
            try:
                self._watch(life)
            finally:
                self._end(life)
            self._count_recovery(newest)
            statuses = [process.exitcode for process in life.processes]
            done = all(status == 0 for status in statuses)
            self._judge(life, statuses, done)
            if done or life.hangs:
                return self.result
            faultless = faultless + 1 if len(self.result.struck) == num_struck else 0
            if faultless >= _FAULTLESS_LIVES:
                return self.result

    def _start_life(self, number: int) -> _Life:
        self._board.clear(self.plan.ranks)
        bad = tuple((fault.where, fault.after_step - 1, fault.ranks[0]) for fault in self._bad_values())
        processes = start_life(self.plan, self._folder, self.run, self._data, number, bad=bad)
        now = time.monotonic()
        return _Life(number, processes, now, now)

    def _bad_values(self) -> list[Fault]:
        return [fault for fault in self.plan.faults if fault.kind == "nan"]

    def _watch(self, life: _Life) -> None:
        """Let faults strike until the life has ended."""
        while running := [process for process in life.processes if process.exitcode is None]:
            wait([process.sentinel for process in running], _POLL_SECONDS)
            now = time.monotonic()
            self._look(life, now)
            if life.ending is None and life.failed_at is None:
                self._strike_if_due(life, now)
            if life.slow_until is not None and now >= life.slow_until:
                self._restore_link(life)
            self._act_as_agent(life, now)
            if now - life.moved > HANG_SECONDS:
                life.hangs = True
                return

    def _look(self, life: _Life, now: float) -> None:
        steps = self._board.steps()
        if steps != life.steps:
            life.steps, life.moved = steps, now

    def _act_as_agent(self, life: _Life, now: float) -> None:
        """Stop the other ranks when one has failed, as torchrun's agent does."""
        if life.failed_at is None and any(process.exitcode for process in life.processes):
            life.failed_at = life.moved = now
        if life.failed_at is not None and not life.stopped and now - life.failed_at > _AGENT_SECONDS:
            life.stopped = True
            for process in life.processes:
                _send(process, signal.SIGTERM)

    def _strike_if_due(self, life: _Life, now: float) -> None:
        if not self._waiting:
            return
        fault = self._waiting[0]
        begins = life.steps < 0
        if fault.at_start and begins:
            due = life.started + fault.delay
        elif not begins and life.steps >= fault.after_step:
            if fault.in_save and self._what_happens(life) != "saving":
                return
            life.due = life.due or now + (0.0 if fault.in_save else fault.delay)
            due = life.due
        else:
            return
        if now < due or (life.slow_until is not None and fault.kind == "link"):
            return
        self._waiting.pop(0)
        life.due = None
        record = {**asdict(fault), "job": self.plan.number, "life": life.number, "at_step": life.steps}
        record["while"] = self._what_happens(life)
        self._strike(fault, life, now)
        if fault.kind in ENDING:
            life.ending, life.moved = record, now
        else:
            life.slow = record

    def _what_happens(self, life: _Life) -> str:
        if life.steps < 0:
            return "starting"
        return "saving" if list(self.run.glob("checkpoints/.step-*.part")) else "training"

    def _strike(self, fault: Fault, life: _Life, now: float) -> None:
        if fault.kind == "disk":
            self._disk.fill()
        elif fault.kind == "link":
            self._link.slow(fault.megabits)
            life.slow_until = now + fault.seconds
        else:
            for rank in fault.ranks:
                _send(life.processes[rank], signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)

    def _restore_link(self, life: _Life) -> None:
        """End a slow link; it has struck if a message had to wait for it."""
        assert life.slow is not None
        delayed = self._link.delayed()
        self._link.restore()
        if delayed:
            self.result.struck.append({**life.slow, "delayed_messages": delayed})
        life.slow_until = life.slow = None

    def _end(self, life: _Life) -> None:
        """End what is left of a life, and what its faults have changed."""
        for process in life.processes:
            process.kill()
            process.join()
        if life.slow_until is not None:
            self._restore_link(life)
        if life.ending is not None and life.ending["kind"] == "disk":
            self._disk.free()

    def _newest_checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint, -1 without one."""
        with suppress(OSError):
            names = os.listdir(self.run / "checkpoints")
            return max((int(name[5:]) for name in names if name.startswith("step-")), default=-1)
        return -1

    def _count_recovery(self, newest: int) -> None:
        """Count the steps of the checkpoint that was complete before this life and that it did not go on from."""
        begun_with = self._board.begun_with()
        if begun_with < 0:
            return
        self.result.lost_checkpoint_steps += max(0, newest - begun_with)
        self.result.from_survivors += begun_with > max(newest, 0)

    def _judge(self, life: _Life, statuses: Sequence[int | None], done: bool) -> None:
        """Note the fault that ended a life, and what should not be: a hang, an end without a fault, a traceback."""
        where = f"job {self.plan.number}, life {life.number}"
        if life.hangs:
            self.result.hangs += 1
            self.result.problems.append(f"{where}: no step and no end for {HANG_SECONDS:g} s ({life.ending})")
            return
        if not done and life.ending is not None:
            self.result.struck.append({**life.ending, "statuses": list(statuses)})
        if not done and life.ending is None:
            self.result.problems.append(f"{where}: ended with {list(statuses)} without a fault")
        killed = life.ending["ranks"] if life.ending is not None and life.ending["kind"] == "kill" else ()
        for rank, status in enumerate(statuses):
            expected = (
                0,
                _SIGTERM_STATUS,
                _ERROR_STATUS,
                -signal.SIGTERM,
                *([-signal.SIGKILL] if rank in killed else []),
            )
            if status not in expected:
                self.result.problems.append(f"{where}: rank {rank} ended with {status}: {self._last_words(life, rank)}")

    def _last_words(self, life: _Life, rank: int) -> str:
        with suppress(OSError):
            lines = log_of(self._folder, life.number, rank).read_text(errors="replace").splitlines()
            return lines[-1] if lines else "no message"
        return "no message"


def start_life(
    plan: JobPlan,
    folder: Path,
    run: Path,
    data: Path,
    number: int,
    *,
    bad: tuple[tuple[str, int, int], ...] = (),
    left_out: tuple[int, ...] = (),
) -> list[BaseProcess]:
    """Start the ranks of a job; life 0 is the undisturbed job."""
    overrides = [part for key, value in plan.settings.items() for part in ("--set", f"{key}={_text(value)}")]
    arguments = ("train", "quickstart", "--data", str(data), "--out", str(run), "--resume", *overrides)
    port = _free_port()
    return [
        start_rank(
            RankTask(
                life=number,
                rank=rank,
                ranks=plan.ranks,
                port=port,
                arguments=arguments,
                board=str(folder / "board"),
                log=str(log_of(folder, number, rank)),
                trajectory=str(folder / f"trajectory-{'undisturbed-' * (number == 0)}{rank}.jsonl"),
                bad=bad,
                left_out=left_out,
            ),
        )
        for rank in range(plan.ranks)
    ]


def log_of(folder: Path, life: int, rank: int) -> Path:
    """Return the file with what a rank has printed in a life."""
    return folder / f"life-{life}-rank-{rank}.txt"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _send(process: BaseProcess, number: int) -> None:
    with suppress(ProcessLookupError):
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
