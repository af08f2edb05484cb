"""Threads that each do one kind of work in the order in which it is handed to them, and a stand-in without threads.

A worker that fails does nothing more: what is handed to it afterwards fails with the same error, which names the stage
and the step, so whoever waits for any of it learns why. `stage` does the same for work of the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from turbogr.errors import UserError
from turbogr.train.lanes import Lane, follow, mark_here
from turbogr.train.timeline import Timeline

_ABANDON_SECONDS = 5.0


class StageFailed(RuntimeError):
    """A stage of the pipeline raised; the cause is what it raised."""


@contextmanager
def stage(name: str, step: int) -> Iterator[None]:
    """Name the stage and the step in whatever the block raises.

    Raises:
        StageFailed: the block failed; a UserError keeps its type, and what names its stage already stays as it is.
    """
    try:
        yield
    except Exception as error:
        told = _told(error, name, step)
        if told is error:
            raise
        raise told from error


class Job:
    """A result to come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._future: Future[tuple[Any, Any]] = Future()

    def set(self, value: Any, mark: Any = None) -> None:
        self._future.set_result((value, mark))

    def fail(self, error: BaseException) -> None:
        self._future.set_exception(error)

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        """Wait for the work and return what it returned, ready for the device work of the calling thread.

        Raises:
            StageFailed: the work or some before it failed; a UserError keeps its type.
        """
        value, mark = self._future.result()
        follow(mark, value, self._device)
        return value


class Worker(Protocol):
    """Does jobs in the order of the posts."""

    def post(self, work: Callable[..., Any], step: int, *arguments: Any) -> Job:
        """Have work(*arguments) done for a step, after the device work that the caller has sent so far; arguments that
        are jobs are waited for first, in the worker."""
        ...

    def close(self) -> None:
        """Wait until all that was posted is done."""
        ...

    def abandon(self) -> None:
        """Begin nothing more of what was posted."""
        ...

    def wait_a_little(self) -> None:
        """Wait some seconds for what is being done; beyond that the process can end without it."""
        ...


class Inline:
    """A worker without a thread: what is posted is done at once, by the caller."""

    def __init__(self, name: str, device: torch.device, timeline: Timeline) -> None:
        self.name, self.device, self.timeline = name, device, timeline

    def post(self, work: Callable[..., Any], step: int, *arguments: Any) -> Job:
        job = Job(self.device)
        given = [_value(argument) for argument in arguments]
        with stage(self.name, step), self.timeline.span("main", self.name, step):
            job.set(work(*given))
        return job

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def wait_a_little(self) -> None: ...


class _Post(NamedTuple):
    job: Job
    work: Callable[..., Any]
    step: int
    arguments: tuple[Any, ...]
    mark: Any


class Threaded:
    """A worker with a thread and a lane of its own. The thread never keeps the process from ending."""

    def __init__(self, name: str, device: torch.device, timeline: Timeline) -> None:
        self.name, self.device, self.timeline = name, device, timeline
        self._posts: SimpleQueue[_Post | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._lane = Lane(device)
        self._thread = threading.Thread(target=self._run, name=f"turbogr-{name}", daemon=True)
        self._thread.start()

    def post(self, work: Callable[..., Any], step: int, *arguments: Any) -> Job:
        job = Job(self.device)
        self._posts.put(_Post(job, work, step, arguments, mark_here(self.device)))
        return job

    def close(self) -> None:
        self._posts.put(None)
        self._thread.join()

    def abandon(self) -> None:
        self._failure = self._failure or StageFailed(f"stage '{self.name}' was given up")
        self._posts.put(None)

    def wait_a_little(self) -> None:
        self._thread.join(_ABANDON_SECONDS)

    def _run(self) -> None:
        while (post := self._posts.get()) is not None:
            try:
                with self._lane.active():
                    self._do(post)
            except BaseException as error:
                # Also what is no Exception must reach whoever waits: nobody sees this thread end.
                self._failure = self._failure or error
                post.job.fail(self._failure)

    def _do(self, post: _Post) -> None:
        follow(post.mark, post.arguments, self.device)
        given = [_value(argument) for argument in post.arguments]
        if self._failure is not None:
            raise self._failure
        try:
            with self.timeline.span(self.name, self.name, post.step):
                value = post.work(*given)
        except BaseException as error:
            raise _told(error, self.name, post.step) from error
        post.job.set(value, self._lane.mark())


def _value(argument: Any) -> Any:
    return argument.result() if isinstance(argument, Job) else argument


def _told(error: BaseException, name: str, step: int) -> BaseException:
    """The error with the stage and step (counted from 1) it happened in; mistakes of the user stay such."""
    where = f"stage '{name}' of step {step + 1}"
    if isinstance(error, StageFailed):
        return error
    if not isinstance(error, UserError):
        return StageFailed(f"{where} failed: {type(error).__name__}: {error}")
    if error.stage is not None:
        return error
    told = type(error)(f"{error} (in {where})")
    told.stage = name
    return told
