"""The ranks of a job: who this process is, how ranks talk, and how they agree.

A process that was not started as one of several is a world of its own; every method then returns at once without
touching torch.distributed. Small values travel over gloo through host memory, whatever the device; tensors of the
training step use the device's own backend (`turbogr/parallel/mesh.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from turbogr.errors import RankLost, ToldElsewhere, UserError
from turbogr.parallel.meeting import meet
from turbogr.parallel.pulse import Pulse

_T = TypeVar("_T")

_STOP_KEY, _LAST_WORDS_KEY = "stop", "last-words-"
_STOP_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
_LAST_WORDS_SECONDS = 1.0  # connections break a moment before a rank has said why

_pulse: Pulse | None = None
_given_up = False


@dataclass(frozen=True)
class World:
    """This process's place: rank `rank` of `size`, and `local_rank` of the `local_size` ranks on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarted: bool = False  # torchrun has started the job, or a part of it, again after a failure

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that prints and writes."""
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """Return `values` [k] (CPU) of every rank, [size, k], the same on all."""
        if self.size == 1:
            return values[None]
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        with contact():
            dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def gather_objects(self, value: _T) -> list[_T]:
        """Return a picklable value of every rank in rank order, the same list on all."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        with contact():
            dist.all_gather_object(everyone, value)
        return everyone

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with contact():
                dist.barrier()

    def together(self, work: Callable[[], _T]) -> _T:
        """Run `work` on every rank and return its result, if it succeeds on all of them.

        Otherwise rank 0 raises what it met itself, or a UserError that names the rank that failed and why, and the
        other ranks raise ToldElsewhere: a mistake is told once.
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
            raise ToldElsewhere(f"rank {failed[0]} failed") from failure
        if failure is not None:
            raise failure
        raise UserError(f"rank {failed[0]} of {self.size} failed: {failures[failed[0]]}")

    def on_first(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0 while the others wait; if it fails, every rank ends (see `together`)."""
        self.together(work if self.is_first else lambda: None)

    @contextmanager
    def telling_once(self) -> Iterator[None]:
        """Let rank 0 alone raise a mistake that all ranks meet inside the block; the others raise ToldElsewhere.

        A rank that met it alone leaves its message for the RankLost that the others raise.
        """
        try:
            yield
        except RankLost:
            raise
        except (UserError, OSError) as error:
            if self.size > 1:
                _leave_word(self.rank, str(error))
            if self.is_first:
                raise
            raise ToldElsewhere(str(error)) from error
        except Exception as error:
            if self.size > 1:
                _leave_word(self.rank, f"{type(error).__name__}: {error}")
            raise

    def tell_stop(self) -> None:
        """Let `stop_watch` of all ranks see it."""
        if self.size > 1:
            _store().set(_STOP_KEY, b"1")

    def stop_watch(self) -> Callable[[], bool]:
        """Return a function that says whether some rank called `tell_stop`; it asks at most twice a second."""
        if self.size == 1:
            return lambda: False
        next_look, seen = [0.0], [False]

        def told() -> bool:
            now = time.monotonic()
            if not seen[0] and now >= next_look[0]:
                next_look[0] = now + _STOP_POLL_SECONDS
                seen[0] = bool(_store().check([_STOP_KEY]))
            return seen[0]

        return told


def is_one_of_many() -> bool:
    """Whether this process was started as one of several ranks (torchrun sets the environment)."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_rank() -> bool:
    """Whether this process is the rank that prints and writes."""
    return not is_one_of_many() or os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(timeout: float = 1800.0, start_timeout: float = 300.0) -> Iterator[World]:
    """Connect to the other ranks for the time of the `with` block, as the environment of torchrun says.

    `timeout` is how many seconds a rank waits for an answer of another one that lives before it gives up,
    `start_timeout` how many it waits for all to come. `set_patience` says how long one may show no sign of life.
    Without other ranks nothing happens. A process group that the caller has made is used and left alone.

    Raises:
        UserError: the ranks do not find each other; it says which are missing.
    """
    if not is_one_of_many():
        yield World()
        return
    global _given_up
    _given_up = False
    ours = not dist.is_initialized()
    restarted = _initialise(timeout, start_timeout) if ours else _is_restarted()
    world = World(
        dist.get_rank(),
        dist.get_world_size(),
        int(os.environ.get("LOCAL_RANK", dist.get_rank())),
        int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        restarted,
    )
    try:
        yield world
    finally:
        if ours:
            _end_pulse()
            dist.destroy_process_group()


def set_patience(seconds: float | None) -> None:
    """Let this rank end the job when another shows no sign of life for so long; None: never."""
    if _pulse is not None:
        _pulse.seconds = seconds


def give_up() -> None:
    """Let no thread look for the reason of a connection that breaks from now on: this process breaks them itself."""
    global _given_up
    _given_up = True


def _end_pulse() -> None:
    global _pulse
    if _pulse is not None:
        _pulse.stop()
        _pulse.linger()
        _pulse = None


def _is_restarted() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _initialise(timeout: float, start_timeout: float) -> bool:
    """Connect to the other ranks; return whether any of them was started again."""
    global _pulse
    accelerator = torch.accelerator.current_accelerator()
    backend = "gloo"
    if accelerator is not None:
        backend = f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        agent_keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeps_store = rank == 0 and not agent_keeps_store
        job = PrefixStore("turbogr", _open_store(keeps_store, start_timeout))
        life, restarted = meet(job, rank, size, start_timeout, restarted=_is_restarted())
        store = PrefixStore(life, job)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        where = f"{'torchrun' if agent_keeps_store else 'rank 0'} on {os.environ['MASTER_ADDR']}"
        pulse_store = PrefixStore(f"turbogr/{life}/pulse", _open_store(False, start_timeout))
        _pulse = Pulse(
            pulse_store, rank, size, _PATIENCE_SECONDS, keeper=f"the job's store ({where})", keeps=keeps_store
        )
        _pulse.start()
        return restarted
    except (RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"rank {os.environ.get('RANK', '?')} could not meet the other ranks: {_first_line(error)}. Check that "
            "every rank was started and that MASTER_ADDR can be reached"
        ) from error


def _open_store(keep: bool, seconds: float) -> Store:
    """Connect to the store of the job, which torchrun's agent keeps, or else rank 0: it calls with `keep` first."""
    return dist.TCPStore(  # type: ignore[attr-defined, no-any-return]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=keep,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


class _Waits(threading.local):
    """Seconds that a thread has spent in talks with other ranks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}


_waits = _Waits()


def seconds_in_contact(purpose: str) -> float:
    """Seconds that the calling thread has spent inside `contact(purpose)` so far."""
    return _waits.seconds.get(purpose, 0.0)


@contextmanager
def contact(purpose: str = "agreement") -> Iterator[None]:
    """Turn what a broken connection raises inside the block into RankLost; its time counts for the purpose."""
    started = time.perf_counter()
    if _pulse is not None:
        _pulse.count_call()
    try:
        yield
        _waits.seconds[purpose] = seconds_in_contact(purpose) + time.perf_counter() - started
    except RuntimeError as error:
        raise RankLost(
            f"rank {dist.get_rank()} lost contact with another rank: {_why_lost(error)}. The run continues from its "
            "last checkpoint with --resume"
        ) from error


def _why_lost(error: RuntimeError) -> str:
    """Find out who is missing: what ranks have said, or who is silent, or who has not come."""
    if _given_up:
        return "it has given up itself"
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while not (told := _words_left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if told or _pulse is None:
        return told or f"{_first_line(error)}. Find the rank that ended first and why"
    gone = _pulse.gone()
    if told := _words_left():
        return told
    if gone:
        return f"{gone} has died, or was stopped, without a word"
    behind = _pulse.behind()
    who = f"{behind} has not come to where this one waits" if behind else "Find the rank that ended first and why"
    return f"{_first_line(error)}. {who}"


def _leave_word(rank: int, text: str) -> None:
    """Tell the store why this rank ends, in case that it is the only one that does."""
    with suppress(RuntimeError):
        _store().set(f"{_LAST_WORDS_KEY}{rank}", text)


def _words_left() -> str:
    """What ranks have said before they ended, "" for nothing."""
    with suppress(RuntimeError):
        names = {rank: f"{_LAST_WORDS_KEY}{rank}" for rank in range(dist.get_world_size())}
        said = {rank: _store().get(name).decode() for rank, name in names.items() if _store().check([name])}
        return "; ".join(f"rank {rank} ended with: {text.rstrip('.')}" for rank, text in said.items())
    return ""


def first_difference(records: Sequence[dict[str, Any]]) -> tuple[int, str] | None:
    """Return (rank, key) of the first record that differs from that of rank 0, None where all are equal."""
    for rank, record in enumerate(records):
        for key in sorted(records[0].keys() | record.keys()):
            if record.get(key) != records[0].get(key):
                return rank, key
    return None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _first_line(error: BaseException) -> str:
    """The message without the source position that C++ puts first and gloo's guesses that come last."""
    text = " ".join(str(error).split("\n")[0].split()).split(". This is typically", 1)[0]
    return text.split("] ", 1)[1] if text.startswith("[") and "] " in text else text
