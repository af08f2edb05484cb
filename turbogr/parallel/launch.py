"""Start several ranks on this machine with torch's elastic agent, as `torchrun --standalone` does.

All connections of the job are on the loopback interface: nothing of it can be reached from the network.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from turbogr.errors import UserError
from turbogr.machine import usable_cores
from turbogr.parallel import loopback_rendezvous
from turbogr.parallel.heartbeat import SILENT_RANK_STATUS
from turbogr.parallel.world import is_distributed

_RANKS_VARIABLE = "TURBOGR_RANKS"
_SHUTDOWN_SECONDS = 120  # for the checkpoint that an interrupted run writes


def check_ranks(ranks: int) -> None:
    """Check the value of `--ranks`.

    Raises:
        UserError: not a positive number, or this process is a rank already.
    """
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; give at least 1")
    if is_distributed():
        raise UserError("this process is already one of several ranks (WORLD_SIZE is set); leave --ranks out")


def launched_ranks() -> int | None:
    """Return how many ranks `launch` has started, this one among them; None if `launch` did not start this process."""
    ranks = os.environ.get(_RANKS_VARIABLE)
    return None if ranks is None else int(ranks)


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `turbogr ARGUMENTS` as `ranks` processes and return the exit status; signals are passed on to all ranks.

    The cores of this machine are divided among the ranks unless OMP_NUM_THREADS is set. When a rank ends with an error,
    the others are stopped.

    Raises:
        UserError: a rank was killed; the message names it.
    """
    # The agent's own log of a failure is long and for its developers; we print a sentence from the exception.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_SECONDS),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        _RANKS_VARIABLE: str(ranks),
    }
    loopback_rendezvous.register()
    with _environment(settings):
        config = LaunchConfig(  # reads the environment
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=str(uuid.uuid4()),
            rdzv_backend=loopback_rendezvous.BACKEND,
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "turbogr", *arguments)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            return exit_status(failed.failures, ranks)
    return 0


def exit_status(failures: Mapping[int, ProcessFailure], ranks: int) -> int:
    """Return the exit status of a job whose ranks ended with `failures`.

    Raises:
        UserError: a rank was killed by a signal that the agent did not send.
    """
    # A rank that hangs does not react to the agent's SIGTERM and is then killed by the agent; the ranks that ended
    # because of it have printed the error already.
    if any(failure.exitcode == SILENT_RANK_STATUS for failure in failures.values()):
        return 2
    # Ranks that lost contact end with an error too, perhaps earlier; the rank that was killed is the cause.
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            out_of_memory = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
            raise UserError(
                f"rank {rank} of {ranks} was killed by {name}{out_of_memory}, and the other ranks were stopped. The "
                "run continues from its last checkpoint with --resume"
            )
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the ranks, except those that the user has set; undo it at the end of the block."""

    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
