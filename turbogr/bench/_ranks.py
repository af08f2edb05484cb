"""Several processes for a benchmark: a module that runs as every rank of a job, and what its rank 0 returns."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from turbogr.bench._network import LOOPBACK, Network
from turbogr.errors import UserError
from turbogr.machine import usable_cores
from turbogr.parallel.world import World, joined

_POLL_SECONDS = 0.05
_MOMENT_SECONDS = 0.5
_TOLD_CHARACTERS = 2000


class RankKilled(UserError):
    """A rank of a benchmark was killed from outside."""


def run_as_ranks(
    module: str, ranks: int, options: Mapping[str, Any], network: Network = LOOPBACK, *, threads: int = 1
) -> dict[str, Any]:
    """Run `python -m module` as `ranks` processes, as many on every node of the network; return the result.

    Each has `threads` threads, and as far as they go a core of its own when that is one. The module must call `serve`
    when it is run.

    Raises:
        RankKilled: a rank was killed, as the system does when memory runs out.
        RuntimeError: the processes failed; the message holds the end of what each said.
    """
    assert ranks % len(network.nodes) == 0, (ranks, network)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", module, json.dumps(dict(options)), str(result)]
        port = str(_free_port())
        processes = []
        for rank in range(ranks):
            local_rank, local_size = rank % (ranks // len(network.nodes)), ranks // len(network.nodes)
            node = network.nodes[rank // local_size]
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
            variables = {name: str(value) for name, value in place.items()}
            variables |= {"MASTER_ADDR": network.nodes[0].address, "MASTER_PORT": port, "OMP_NUM_THREADS": str(threads)}
            said = started.enter_context(Path(folder, f"{rank}.txt").open("wb"))
            process = subprocess.Popen(
                node.command(command),
                env={**os.environ, **variables, **node.environment()},
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # Ctrl-C is ours to handle, once
            )
            started.callback(_end, process)
            processes.append(process)
        failed = _failures(processes)
        if -signal.SIGKILL in failed.values():
            raise RankKilled(
                f"a rank of {ranks} was killed, as the system does when memory runs out; smaller models or fewer "
                "sequences need less (--set)"
            )
        if failed:
            told = "; ".join(
                f"rank {rank} of {ranks} ended with {status}: {_last_words(Path(folder, f'{rank}.txt'))}"
                for rank, status in failed.items()
            )
            raise RuntimeError(told)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _failures(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all processes have ended well, or some have not: return the exit status of those ranks.

    The first of them takes others along, so a moment passes before they are counted.
    """
    while True:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            time.sleep(_MOMENT_SECONDS)
            return {rank: status for rank, process in enumerate(processes) if (status := process.poll())}
        if None not in statuses:
            return {}
        time.sleep(_POLL_SECONDS)


def _last_words(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-_TOLD_CHARACTERS:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve(measure: Callable[[World, dict[str, Any]], dict[str, Any]]) -> None:
    """Be a rank of `run_as_ranks`: with one thread stay on one core, measure, and let rank 0 write the result."""
    if hasattr(os, "sched_setaffinity") and os.environ["OMP_NUM_THREADS"] == "1":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    with joined() as world:
        result = measure(world, json.loads(sys.argv[1]))
        if world.is_first:
            Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def ranks_per_core(ranks: int) -> float:
    """Return how many ranks share a core of this machine, at least 1."""
    return max(1.0, ranks / usable_cores())
