"""The ranks of a job: this process's rank, small messages between ranks, and how all ranks agree on a decision.

A process that was not started as one of several is a world of size 1; every method then returns at once and does not
touch torch.distributed. Small values are sent with gloo through host memory, on any device; tensors of the training
step use the device's own backend (`turbogr/parallel/mesh.py`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from turbogr.accelerators import available_accelerator
from turbogr.errors import RankLost, ReportedByOtherRank, UserError
from turbogr.parallel.heartbeat import Heartbeat, end_process
from turbogr.parallel.job_identity import NO_JOB, Job, own_part
from turbogr.parallel.rendezvous import wait_for_ranks
from turbogr.parallel.store_connection import StoreConnection

_T = TypeVar("_T")

_STOP_KEY, _ERROR_KEY = "stop", "error-"
_STOP_POLL_SECONDS = 0.5
_HEARTBEAT_TIMEOUT_SECONDS = 60.0
_ERROR_WAIT_SECONDS = 1.0  # connections may break a moment before the rank has stored its error

_heartbeat: Heartbeat | None = None
_aborting = False
_before_ending: Callable[[], object] | None = None
_kept: list[Any] = []


@dataclass(frozen=True)
class World:
    """This process is rank `rank` of `size`, and `local_rank` of the `local_size` ranks on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    job: Job = NO_JOB

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the rank that prints and writes."""
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """Return the `values` [k] (CPU) of every rank, [size, k], the same on all ranks."""
        if self.size == 1:
            return values[None]
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        with communicating():
            dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def gather_objects(self, value: _T) -> list[_T]:
        """Return the picklable value of every rank in the order of the ranks, the same list on all ranks."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        with communicating():
            dist.all_gather_object(everyone, value)
        return everyone

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        if self.size > 1:
            with communicating():
                dist.barrier()

    def run_on_all(self, work: Callable[[], _T]) -> _T:
        """Run `work` on every rank and return its result, if it succeeds on all of them.

        Otherwise rank 0 raises its own exception, or a UserError that names the rank that failed and why. The other
        ranks raise ReportedByOtherRank, so that an error is printed once.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failures = self.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        failed = [rank for rank, reason in enumerate(failures) if reason is not None]
        if not failed:
            return result  # type: ignore[no-any-return]
        if not self.is_first:
            raise ReportedByOtherRank(f"rank {failed[0]} failed") from failure
        if failure is not None:
            raise failure
        raise UserError(f"rank {failed[0]} of {self.size} failed: {failures[failed[0]]}")

    def run_on_first(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0 while the others wait; if it fails, every rank ends (see `run_on_all`)."""
        self.run_on_all(work if self.is_first else lambda: None)

    @contextmanager
    def reporting_errors_once(self) -> Iterator[None]:
        """If all ranks raise the same UserError inside the block, only rank 0 does; the others ReportedByOtherRank.

        A rank that fails alone stores its message in the job's store; the RankLost of the other ranks quotes it.
        """
        try:
            yield
        except RankLost:
            raise
        except (UserError, OSError) as error:
            if self.size > 1:
                _store_error(self.rank, str(error))
            if self.is_first:
                raise
            raise ReportedByOtherRank(str(error)) from error
        except Exception as error:
            if self.size > 1:
                _store_error(self.rank, f"{type(error).__name__}: {error}")
            raise

    def request_stop(self) -> None:
        """Ask all ranks to stop; they see it through `stop_poller`."""
        if self.size > 1:
            _store().set(_STOP_KEY, b"1")

    def stop_poller(self) -> Callable[[], bool]:
        """Return a function: has a rank called `request_stop`? It asks the store at most twice a second."""
        if self.size == 1:
            return lambda: False
        next_poll, requested = [0.0], [False]

        def stop_requested() -> bool:
            now = time.monotonic()
            if not requested[0] and now >= next_poll[0]:
                next_poll[0] = now + _STOP_POLL_SECONDS
                requested[0] = bool(_store().check([_STOP_KEY]))
            return requested[0]

        return stop_requested


def is_distributed() -> bool:
    """Whether this process was started as one of several ranks (torchrun sets the environment)."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, the rank that prints and writes."""
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


@contextmanager
def connected_world(timeout: float = 1800.0, start_timeout: float = 300.0) -> Iterator[World]:
    """Connect to the other ranks during the `with` block, as the environment variables of torchrun say.

    `timeout`: seconds that a message may take. `start_timeout`: seconds to wait for all ranks at the start. Ranks that
    hang are found earlier, see `set_heartbeat_timeout`. Without other ranks nothing is connected. If the caller has
    already initialised a process group, that one is used and not destroyed.

    Raises:
        UserError: not all ranks connect; it says which are missing.
    """
    if not is_distributed():
        yield World(job=Job.of_ranks([own_part()]))
        return
    global _aborting
    _aborting = False
    ours = not dist.is_initialized()
    with _signals_end_process():
        if ours:
            _initialise(timeout, start_timeout)
        world = World(
            dist.get_rank(),
            dist.get_world_size(),
            int(os.environ.get("LOCAL_RANK", dist.get_rank())),
            int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        )
    try:
        with _signals_end_process():
            world = replace(world, job=Job.of_ranks(world.gather_objects(own_part())))
        yield world
    finally:
        if ours:
            _disconnect()


Ranks = Callable[[], Any]
"""Returns a process group that `new_group` has created."""


def new_group(ranks: Sequence[int] | None = None) -> Ranks:
    """Create a process group of `ranks`, by default all; all ranks of the world call it together."""
    with _signals_end_process():
        created = dist.new_group(None if ranks is None else list(ranks))
    return (lambda: created) if isinstance(created, int) else while_connected(created)  # an int: not for this rank


def while_connected(value: _T) -> Callable[[], _T]:
    """Keep what holds process groups until the ranks disconnect; return a function that returns it until then.

    The threads of a process group end when no object has it any more, so an object that may outlive the world must not
    own one.
    """
    _kept.append(value)
    reference = weakref.ref(value)

    def kept() -> _T:
        found = reference()
        if found is None:
            raise RuntimeError("the ranks are disconnected")
        return found

    return kept


def set_heartbeat_timeout(seconds: float | None) -> None:
    """End the job when another rank sends no heartbeat for `seconds`; None: never."""
    if _heartbeat is not None:
        _heartbeat.timeout = seconds


@contextmanager
def before_ending(work: Callable[[], object]) -> Iterator[None]:
    """Call `work` in the thread of the heartbeat before it ends this process; other threads may be running."""
    global _before_ending
    _before_ending = work
    try:
        yield
    finally:
        _before_ending = None


def _end(message: str) -> None:
    try:
        if _before_ending is not None:
            _before_ending()
    finally:
        end_process(message)


def mark_aborting() -> None:
    """Declare that this process closes its own connections: when one breaks, no thread searches for the cause."""
    global _aborting
    _aborting = True


def _disconnect() -> None:
    """Stop the heartbeat and destroy all process groups, so that no thread of theirs is left."""
    global _heartbeat
    try:
        if _heartbeat is not None:
            _heartbeat.stop()
            _heartbeat.wait_for_others()
    finally:
        _heartbeat = None
        _kept.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _signals_end_process() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end this process at once.

    While ranks connect, PyTorch waits in C++ for the others, up to `timeout`, and lets no handler of Python run; one of
    them may be gone. Nothing is being written then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    changed = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in changed:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def _initialise(timeout: float, start_timeout: float) -> None:
    """Connect to the other ranks."""
    global _heartbeat
    accelerator = available_accelerator()
    backend = "gloo"
    if accelerator is not None:
        backend = f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        agent_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosts_store = rank == 0 and not agent_hosts_store
        job = PrefixStore("turbogr", _open_store(hosts_store, start_timeout))
        attempt = wait_for_ranks(job, rank, size, start_timeout)
        store = PrefixStore(attempt, job)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        host = f"{'torchrun' if agent_hosts_store else 'rank 0'} on {os.environ['MASTER_ADDR']}"
        connection = StoreConnection(
            lambda seconds: PrefixStore(f"turbogr/{attempt}/heartbeat", _open_store(False, seconds)),
            int(os.environ["MASTER_PORT"]),
        )
        connection.store(start_timeout)
        _heartbeat = Heartbeat(
            connection,
            rank,
            size,
            _HEARTBEAT_TIMEOUT_SECONDS,
            store_host=f"the job's store ({host})",
            hosts_store=hosts_store,
            end=_end,
        )
        _heartbeat.start()
    except (RuntimeError, ValueError, KeyError) as error:
        _disconnect()
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"rank {os.environ.get('RANK', '?')} could not connect to the other ranks: {_first_line(error)}. Check "
            "that every rank was started and that MASTER_ADDR can be reached"
        ) from error


def _open_store(host: bool, seconds: float) -> Store:
    """Connect to the store of the job. torchrun's agent hosts it, or else rank 0, whose first call has `host` set."""
    return dist.TCPStore(  # type: ignore[attr-defined, no-any-return]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=host,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


class _CommunicationTimes(threading.local):
    """Seconds that a thread has spent communicating with other ranks, by purpose."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}


_times = _CommunicationTimes()


def communication_seconds(purpose: str) -> float:
    """Return the seconds that the calling thread has spent inside `communicating(purpose)` so far."""
    return _times.seconds.get(purpose, 0.0)


@contextmanager
def communicating(purpose: str = "agreement") -> Iterator[None]:
    """Turn the error of a broken connection inside the block into RankLost; count the block's time for `purpose`."""
    started = time.perf_counter()
    if _heartbeat is not None:
        _heartbeat.count_collective()
    try:
        yield
        _times.seconds[purpose] = communication_seconds(purpose) + time.perf_counter() - started
    except RuntimeError as error:
        raise RankLost(
            f"rank {dist.get_rank()} lost contact with another rank: {_why_lost(error)}. The run continues from its "
            "last checkpoint with --resume"
        ) from error


def _why_lost(error: RuntimeError) -> str:
    """Find the cause: an error that a rank has stored, or a rank without heartbeat, or one that is late."""
    if _aborting:
        return "this rank has closed its own connections"
    deadline = time.monotonic() + _ERROR_WAIT_SECONDS
    while not (errors := _stored_errors()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if errors or _heartbeat is None:
        return errors or f"{_first_line(error)}. Find the rank that ended first and why"
    silent = _heartbeat.name_silent_ranks()
    if errors := _stored_errors():
        return errors
    if silent:
        return f"{silent} has crashed or was stopped, without an error message"
    late = _heartbeat.name_late_ranks()
    if late:
        return f"{_first_line(error)}. {late} has not reached the collective in which this rank waits"
    return f"{_first_line(error)}. Find the rank that ended first and why"


def _store_error(rank: int, text: str) -> None:
    """Store why this rank ends, in case that the other ranks do not know."""
    with suppress(RuntimeError):
        _store().set(f"{_ERROR_KEY}{rank}", text)


def _stored_errors() -> str:
    """Return the errors that ranks stored before they ended, "" for none."""
    with suppress(RuntimeError):
        keys = {rank: f"{_ERROR_KEY}{rank}" for rank in range(dist.get_world_size())}
        errors = {rank: _store().get(key).decode() for rank, key in keys.items() if _store().check([key])}
        return "; ".join(f"rank {rank} ended with: {text.rstrip('.')}" for rank, text in errors.items())
    return ""


def first_difference(records: Sequence[dict[str, Any]]) -> tuple[int, str] | None:
    """Return (rank, key) of the first record that differs from that of rank 0, None if all are equal."""

    for rank, record in enumerate(records):
        for key in sorted(records[0].keys() | record.keys()):
            if record.get(key) != records[0].get(key):
                return rank, key
    return None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _first_line(error: BaseException) -> str:
    """Return the message without C++'s source position at its start and gloo's guesses at its end."""
    text = " ".join(str(error).split("\n")[0].split()).split(". This is typically", 1)[0]
    return text.split("] ", 1)[1] if text.startswith("[") and "] " in text else text
