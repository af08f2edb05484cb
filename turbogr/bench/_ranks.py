"""Run a module as every rank of a job, for a benchmark, and return the result of its rank 0."""

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
from turbogr.parallel.world import World, connected_world

_POLL_SECONDS = 0.05
_FAILURE_SECONDS = 0.5  # to wait for the ranks that fail because one did
_SHOWN_CHARACTERS = 2000


class RankKilled(UserError):
    """A rank of a benchmark was killed by the system or by another process."""


def run_as_ranks(
    module: str, ranks: int, options: Mapping[str, Any], network: Network = LOOPBACK, *, threads: int = 1
) -> dict[str, Any]:
    """Run `python -m module` as `ranks` processes, the same number on every node of the network; return the result.

    Each has `threads` threads. With one thread, each rank is pinned to a core of its own, as long as there are enough.
    The module must call `rank_main` when it is run.

    Raises:
        RankKilled: a rank was killed, as the system does when memory runs out.
        RuntimeError: processes failed; the message has the end of the output of each.
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
            numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
            variables = {name: str(value) for name, value in numbers.items()}
            variables |= {"MASTER_ADDR": network.nodes[0].address, "MASTER_PORT": port, "OMP_NUM_THREADS": str(threads)}
            output = started.enter_context(Path(folder, f"{rank}.txt").open("wb"))
            process = subprocess.Popen(
                node.command(command),
                env={**os.environ, **variables, **node.environment()},
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,  # so that Ctrl-C reaches only this process
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
            message = "; ".join(
                f"rank {rank} of {ranks} ended with {status}: {_end_of(Path(folder, f'{rank}.txt'))}"
                for rank, status in failed.items()
            )
            raise RuntimeError(message)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _failures(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all processes have succeeded or one has failed; return the exit status of the failed ranks.

    A rank that fails makes others fail, so they are counted half a second later.
    """
    while True:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            time.sleep(_FAILURE_SECONDS)
            return {rank: status for rank, process in enumerate(processes) if (status := process.poll())}
        if None not in statuses:
            return {}
        time.sleep(_POLL_SECONDS)


def _end_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_main(measure: Callable[[World, dict[str, Any]], dict[str, Any]]) -> None:
    """Run as a rank of `run_as_ranks`: pin to one core if it has one thread, measure; rank 0 writes the result."""
    if hasattr(os, "sched_setaffinity") and os.environ["OMP_NUM_THREADS"] == "1":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    with connected_world() as world:
        result = measure(world, json.loads(sys.argv[1]))
        if world.is_first:
            Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def ranks_per_core(ranks: int) -> float:
    """Return how many ranks share one core of this machine, at least 1."""
    return max(1.0, ranks / usable_cores())
