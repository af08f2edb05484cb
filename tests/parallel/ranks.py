"""Real ranks for tests: processes that connect over gloo, forked from a server that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from turbogr.option_names import command_line

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "turbogr.training.run", "tests.parallel.ranks"])


def run_ranks(size: int, function: Callable[..., Any], *args: Any, local_size: int | None = None) -> list[Any]:
    """Call function(*args) in `size` processes with the environment of torchrun; return the results.

    `function` must be importable. Raises AssertionError with the traceback of the first rank that failed.
    """
    port = free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = _context.Pipe(duplex=False)
        local = local_size or size
        environment = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        processes.append(_context.Process(target=_run, args=(theirs, environment, function, args), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        results = [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    failures = [f"rank {rank}: {value}" for rank, (fine, value) in enumerate(results) if not fine]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(270) else (False, "no answer within 270 s")
    except EOFError:
        return False, "the process ended without a result"


def _run(pipe: Connection, environment: dict[str, Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    import torch

    torch.set_num_threads(1)
    try:
        with command_line():  # as in tests of this process, see tests/conftest.py
            pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
