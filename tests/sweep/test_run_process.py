"""A run is a process that ends with the one that started it, and starting it is safe in a process with threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turbogr.sweep.run_process import RunProcess

REPORT = """
import ctypes, os
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
print(os.getpid(), os.getsid(0), os.getppid(), number.value)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl")
def test_no_python_code_runs_between_fork_and_exec_and_the_run_ends_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = []
    popen = subprocess.Popen

    def noted(*args: Any, **named: Any) -> Any:
        options.append(named)
        return popen(*args, **named)

    monkeypatch.setattr(subprocess, "Popen", noted)
    run = RunProcess([sys.executable, "-c", REPORT], tmp_path / "log")
    assert run.process.wait(60) == 0, run.last_line()
    number = str(run.process.pid)
    assert run.last_line().split() == [number, number, str(os.getpid()), str(int(signal.SIGTERM))]
    assert options[0].get("preexec_fn") is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl")
def test_a_run_whose_parent_has_ended_already_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)  # no process has this number
    run = RunProcess([sys.executable, "-c", "print('started')"], tmp_path / "log")
    assert run.process.wait(60) == 1
    assert run.last_line() == "the process that started this run has ended"
