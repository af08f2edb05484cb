"""What a process of a job under faults does: it trains by the command line, and shows how far it is.

It runs `turbogr train ... --resume` with the command's own handling of signals and errors, and adds only what a plan
asks for (values that are not finite), a board in shared memory that shows the steps, and a line per step with the
samples of this rank. Processes are forked from a server that has imported everything, so a life costs little.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from turbogr.chaos.bad_values import bad_values
from turbogr.chaos.rank_task import Board, RankTask
from turbogr.device_measurement import Precision
from turbogr.files import replace_text
from turbogr.machine import machine_facts
from turbogr.peak import Peak
from turbogr.training import run as training_run
from turbogr.training.pipeline.executor import PendingBatch
from turbogr.training.trainer import Trainer, TrainResult

_SET_PARENT_DEATH_SIGNAL = 1


def run_rank(task: RankTask) -> None:
    """Train as one rank; SystemExit has the status of the command."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    with open(task.log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(_environment(task))
    torch.set_num_threads(1)
    board = Board(task.board, task.ranks)
    with ExitStack() as changed:
        for kind, step, rank in task.bad:
            changed.enter_context(bad_values(kind, {step}, rank))
        changed.enter_context(mock.patch.object(Trainer, "fit", _noted_fit(task, board)))
        changed.enter_context(mock.patch.object(Trainer, "step", _noted_step(task, board)))
        changed.enter_context(mock.patch.object(training_run, "_peak_of", _no_peak))
        _turbogr(task.arguments)


def _turbogr(arguments: Sequence[str]) -> None:
    """Do what `python -m turbogr ARGUMENTS` does; SystemExit has its status."""
    sys.argv = ["turbogr", *arguments]
    runpy.run_module("turbogr", run_name="__main__")


def _environment(task: RankTask) -> dict[str, str]:
    numbers = {"RANK": task.rank, "WORLD_SIZE": task.ranks, "LOCAL_RANK": task.rank, "LOCAL_WORLD_SIZE": task.ranks}
    return {
        **{name: str(value) for name, value in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TURBOGR_GEMM": "torch",
    }


def _no_peak(device: torch.device, precision: Precision) -> Peak:
    """What these jobs take for the processor's peak, which takes seconds to measure."""
    return Peak(None, 1e11)


def _noted_fit(task: RankTask, board: Board) -> Any:
    original = Trainer.fit

    def fit(self: Trainer) -> TrainResult:
        if task.left_out:
            self.progress.skipped_steps = sorted(task.left_out)
        _note(task, {"begun_with": self.progress.step})
        board.write(task.rank, self.progress.step, self.progress.step)
        return original(self)

    return fit


def _noted_step(task: RankTask, board: Board) -> Any:
    original = Trainer.step

    def step(self: Trainer, pending: PendingBatch) -> None:
        _note(task, {"step": pending.step + 1, "samples": samples_of(pending)})
        original(self, pending)
        board.write(task.rank, self.progress.step)

    return step


def samples_of(pending: PendingBatch) -> list[list[int]]:
    """Return the first event and the length of every sequence of a batch."""
    offsets = pending.batch.items.offsets
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    return [
        [int(event), int(length)] for event, length in zip(pending.batch.events[offsets[:-1]], lengths, strict=True)
    ]


def _note(task: RankTask, line: dict[str, Any]) -> None:
    """Append a line about this life in one write, so that a kill leaves whole lines."""
    handle = os.open(task.trajectory, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(handle, (json.dumps({"life": task.life, **line}, separators=(",", ":")) + "\n").encode())
    finally:
        os.close(handle)


def prepare_data(folder: str, num_users: int, log: str, facts: str) -> None:
    """Prepare a small log of random events; write the facts of this machine to the file `facts`."""
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    replace_text(facts, json.dumps(machine_facts()))
    size = ["--num-users", str(num_users), "--num-items", "300", "--mean-length", "12", "--median-length", "9"]
    _turbogr(["prepare", "synthetic", "--out", folder, *size, "--seed", "0"])
