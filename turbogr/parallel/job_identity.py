"""Which job this process belongs to, so that a run can tell a restart of its own job from another job.

torchrun starts an agent on every machine, and the agents start the ranks: again after a failure, and again when a
machine joins or leaves. No variable that they set names the job. The run id is "none" unless the user gives one, and
scripts give the same one at every launch. The restart count is that of one agent and does not count a machine that
joins. What lasts from one attempt of a job to the next is an agent, so a job is known by the processes of its agents:
two attempts of one job have at least one in common.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_GIVEN_TO_RANKS = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK")  # by the agent; the agent itself does not have them


@dataclass(frozen=True)
class Job:
    """The `agents` of a job, and the process that its rank 0 was started as in this `attempt`."""

    agents: tuple[str, ...] = ()
    attempt: str = ""

    @classmethod
    def of_ranks(cls, parts: Iterable[tuple[str, str]]) -> Job:
        """Put together what `own_part` returned on every rank, in the order of the ranks."""
        listed = list(parts)
        return cls(tuple(sorted({agent for agent, _ in listed if agent})), listed[0][1])

    def to_record(self) -> dict[str, Any]:
        """Return what run.json keeps; `is_restart_of` reads it."""
        return {"agents": list(self.agents), "attempt": self.attempt}

    def is_restart_of(self, record: Any) -> bool:
        """Whether this is a later attempt of the job that wrote `record`, which may be anything.

        A second call in the same attempt is not: the program itself asks twice for the same folder.
        """
        if not isinstance(record, dict) or not isinstance(record.get("agents"), list):
            return False
        return not set(self.agents).isdisjoint(map(str, record["agents"])) and record.get("attempt") != self.attempt


NO_JOB = Job()
"""The job of a process that no agent has started."""


def own_part() -> tuple[str, str]:
    """Return the agent that started this process and what it started, as text; ("", "") if no agent did.

    A script may stand between the agent and this process. So the agent is the first process above this one that does
    not have the variables that it gives to ranks.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "", ""
    given = {f"{name}={os.environ.get(name)}".encode() for name in _GIVEN_TO_RANKS}
    started, agent = os.getpid(), os.getppid()
    with suppress(OSError, ValueError):
        while given <= set((_PROC / str(agent) / "environ").read_bytes().split(b"\0")):
            started, agent = agent, int(_status_fields(agent)[1])
    return _describe_process(agent), _describe_process(started) or f"{socket.gethostname()} process {started}"


def _describe_process(number: int) -> str:
    """Return a text that no other process has, on any machine and at any time; "" if the system does not say enough."""
    host = socket.gethostname()
    with suppress(OSError, IndexError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
        return f"{host} boot {boot} {namespace} process {number} start {_status_fields(number)[19]}"
    if _PROC.is_dir():
        return ""
    with suppress(OSError, subprocess.SubprocessError):  # e.g. macOS
        command = ["ps", "-o", "lstart=", "-p", str(number)]
        started = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        return f"{host} process {number} start {started}" if started else ""
    return ""


def _status_fields(number: int) -> list[str]:
    """Return the fields of a process in /proc/N/stat that come after its name: state, parent, ..., 19: start time."""
    return (_PROC / str(number) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
