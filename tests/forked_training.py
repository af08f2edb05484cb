"""Training processes for tests of sweeps and searches, forked from a server that has already imported torch.

`RunProcess` starts `python -m turbogr train`, which takes seconds before it trains anything. What the tests with the
fixture `forked_training` check is the same without these seconds; commands of other programs are started as usual.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from tests.parallel.ranks import _context
from turbogr.sweep import run_process

_TURBOGR = [sys.executable, "-m", "turbogr"]


class ForkedCommand:
    """What `RunProcess` needs of a `subprocess.Popen` of `python -m turbogr ARGUMENTS`."""

    def __init__(self, arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
        self._process = _context.Process(target=_run, args=(list(arguments), log, dict(environment)), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    os.setsid()
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    from turbogr.cli import main

    sys.exit(main(arguments))


def _start(command: Sequence[str], *, stdout: BinaryIO, env: Mapping[str, str], **options: Any) -> Any:
    for place in range(len(command) - len(_TURBOGR)):
        if list(command[place : place + len(_TURBOGR)]) == _TURBOGR:
            return ForkedCommand(command[place + len(_TURBOGR) :], stdout.name, env)
    return subprocess.Popen(command, stdout=stdout, env=env, **options)


def fork_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps and searches of this process start their runs in forked processes."""
    fake = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(run_process, "subprocess", fake)


@pytest.fixture
def forked_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fork_training` for a test."""
    fork_training(monkeypatch)
