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

from turbogr.bench._children import MeasurementFailed, last_words
from turbogr.bench._network import LOOPBACK, Network
from turbogr.errors import Note, warn_caller
from turbogr.files import replace_text
from turbogr.machine import usable_cores
from turbogr.parallel.world import World, connected_world

_POLL_SECONDS = 0.05
_FAILURE_SECONDS = 0.5  # to wait for the ranks that fail because one did
_LEAVING_SECONDS = 30.0  # for ranks to end when there is a result


class RankFailed(MeasurementFailed):
    """A rank of a benchmark failed."""


class RankKilled(RankFailed):
    """A rank of a benchmark was killed by the system or by another process."""


def run_as_ranks(
    module: str, ranks: int, options: Mapping[str, Any], network: Network = LOOPBACK, *, threads: int = 1
) -> dict[str, Any]:
    """Run `python -m module` as `ranks` processes, the same number on every node of the network; return the result.

    Each has `threads` threads. With one thread, each rank is pinned to a core of its own, as long as there are enough.
    The module must call `rank_main` when it is run. If a rank fails after all ranks have done their work, the result is
    returned, with a warning.

    Raises:
        RankKilled: a rank was killed, as the system does when memory runs out.
        RankFailed: processes failed; the message says why each did, its cause has all that they printed.
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
        failed = _failures(processes, result)
        printed = {rank: Path(folder, f"{rank}.txt").read_text(encoding="utf-8", errors="replace") for rank in failed}
        sentence = "; ".join(
            f"rank {rank} of {ranks} {_ending(status)}: {last_words(printed[rank])}" for rank, status in failed.items()
        )
        if failed and result.exists():
            warn_caller(f"{sentence}. All ranks had done their work, so their result is kept", Note)
        elif -signal.SIGKILL in failed.values():
            raise RankKilled(
                f"a rank of {ranks} was killed, as the system does when memory runs out; smaller models or fewer "
                "sequences need less (--set)"
            )
        elif failed:
            raise RankFailed(sentence) from RuntimeError("\n".join(printed.values()))
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _failures(processes: Sequence[subprocess.Popen[bytes]], result: Path) -> dict[int, int | None]:
    """Wait until all processes have succeeded or one has failed; return the exit status of the failed ranks.

    A rank that fails makes others fail, so they are counted half a second later. When there is a result, the ranks have
    some seconds to end; the status of one that does not is None.
    """
    deadline = None
    while True:
        statuses = [process.poll() for process in processes]
        if None not in statuses and not any(statuses):
            return {}
        if any(statuses):
            time.sleep(_FAILURE_SECONDS)
            return {rank: status for rank, process in enumerate(processes) if (status := process.poll())}
        if deadline is None and result.exists():
            deadline = time.monotonic() + _LEAVING_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return {rank: None for rank, status in enumerate(statuses) if status is None}
        time.sleep(_POLL_SECONDS)


def _ending(status: int | None) -> str:
    return f"did not end within {_LEAVING_SECONDS:g} s" if status is None else f"ended with {status}"


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
        world.barrier()
        if world.is_first:  # a result says that all ranks have done their work
            replace_text(sys.argv[2], json.dumps(result))
        world.barrier()


def ranks_per_core(ranks: int) -> float:
    """Return how many ranks share one core of this machine, at least 1."""
    return max(1.0, ranks / usable_cores())
