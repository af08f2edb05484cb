"""Threads that each do one kind of work, in the order in which jobs are posted, and a substitute without threads.

A worker that fails does nothing more: jobs posted later fail with the same error, which names the stage and the step,
so every thread that waits for one of them gets the cause. `stage` does the same for work of the calling thread.
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
from turbogr.streams import WorkStream, record_here, wait_for_event
from turbogr.training.timeline import Timeline

MakeWorker = Callable[[str, torch.device, Timeline], "Worker"]
"""Makes a worker of (name, device, timeline)."""

_ABANDON_SECONDS = 5.0


class StageFailed(RuntimeError):
    """A stage of the pipeline raised; the cause is what it raised."""


@contextmanager
def stage(name: str, step: int) -> Iterator[None]:
    """Name the stage and the step in whatever the block raises.

    Raises:
        StageFailed: the block failed; a UserError keeps its type, and an error that already names its stage is
            not changed.
    """
    try:
        yield
    except Exception as error:
        named = _with_stage(error, name, step)
        if named is error:
            raise
        raise named from error


class Job:
    """The future result of posted work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._future: Future[tuple[Any, Any]] = Future()

    def set(self, value: Any, event: Any = None) -> None:
        self._future.set_result((value, event))

    def fail(self, error: BaseException) -> None:
        self._future.set_exception(error)

    def done(self) -> bool:
        return self._future.done()

    def succeeded(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def result(self) -> Any:
        """Wait for the work and return what it returned, ready for the device work of the calling thread.

        Raises:
            StageFailed: the work or some before it failed; a UserError keeps its type.
        """
        value, event = self._future.result()
        wait_for_event(event, value, self._device)
        return value


class Worker(Protocol):
    """Runs jobs in the order in which they are posted."""

    def post(self, work: Callable[..., Any], step: int, *arguments: Any) -> Job:
        """Run work(*arguments) for a step, after the device work that the caller has issued so far.

        Arguments that are jobs are waited for first, in the worker.
        """
        ...

    def close(self) -> None:
        """Wait until all posted jobs are done."""
        ...

    def abandon(self) -> None:
        """Start no more posted jobs."""
        ...

    def wait_a_little(self) -> None:
        """Wait a few seconds for the current job; the process can end without it."""
        ...


class Inline:
    """A worker without a thread: the caller runs each job when it posts it."""

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


class Streamed(Inline):
    """A worker with a stream of its own, and without a thread: for stages that exchange vectors of an accelerator.

    The device works on while the host does other things, so a thread would win nothing. Without one, every rank starts
    its collectives in the order of the main thread.
    """

    def __init__(self, name: str, device: torch.device, timeline: Timeline) -> None:
        super().__init__(name, device, timeline)
        self._stream = WorkStream(device)

    def post(self, work: Callable[..., Any], step: int, *arguments: Any) -> Job:
        job = Job(self.device)
        event = record_here(self.device)
        with self._stream.active():
            wait_for_event(event, arguments, self.device)
            given = [_value(argument) for argument in arguments]
            with stage(self.name, step), self.timeline.span(self.name, self.name, step):
                job.set(work(*given), self._stream.record())
        return job


class _Post(NamedTuple):
    job: Job
    work: Callable[..., Any]
    step: int
    arguments: tuple[Any, ...]
    event: Any


class Threaded:
    """A worker with a thread and a stream of its own. The thread never keeps the process from ending."""

    def __init__(self, name: str, device: torch.device, timeline: Timeline) -> None:
        self.name, self.device, self.timeline = name, device, timeline
        self._posts: SimpleQueue[_Post | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._stream = WorkStream(device)
        self._thread = threading.Thread(target=self._run, name=f"turbogr-{name}", daemon=True)
        self._thread.start()

    def post(self, work: Callable[..., Any], step: int, *arguments: Any) -> Job:
        job = Job(self.device)
        self._posts.put(_Post(job, work, step, arguments, record_here(self.device)))
        return job

    def close(self) -> None:
        self._posts.put(None)
        self._thread.join()

    def abandon(self) -> None:
        self._failure = self._failure or StageFailed(f"stage '{self.name}' was abandoned")
        self._posts.put(None)

    def wait_a_little(self) -> None:
        self._thread.join(_ABANDON_SECONDS)

    def _run(self) -> None:
        while (post := self._posts.get()) is not None:
            try:
                with self._stream.active():
                    self._do(post)
            except BaseException as error:
                # A BaseException must reach the waiting thread too: nobody sees this thread end.
                self._failure = self._failure or error
                post.job.fail(self._failure)

    def _do(self, post: _Post) -> None:
        wait_for_event(post.event, post.arguments, self.device)
        given = [_value(argument) for argument in post.arguments]
        if self._failure is not None:
            raise self._failure
        try:
            with self.timeline.span(self.name, self.name, post.step):
                value = post.work(*given)
        except BaseException as error:
            raise _with_stage(error, self.name, post.step) from error
        post.job.set(value, self._stream.record())


def _value(argument: Any) -> Any:
    return argument.result() if isinstance(argument, Job) else argument


def _with_stage(error: BaseException, name: str, step: int) -> BaseException:
    """Return the error with the stage and step (counted from 1) in its message; a UserError stays one."""
    where = f"stage '{name}' of step {step + 1}"
    if isinstance(error, StageFailed):
        return error
    if not isinstance(error, UserError):
        return StageFailed(f"{where} failed: {type(error).__name__}: {error}")
    if error.stage is not None:
        return error
    named = type(error)(f"{error} (in {where})")
    named.stage = name
    return named


def make_worker(name: str, device: torch.device, timeline: Timeline) -> Worker:
    """Make a worker as the device wants it: what communicates on an accelerator has no thread of its own."""
    return (
        Streamed(name, device, timeline)
        if name == "embed" and device.type != "cpu"
        else Threaded(name, device, timeline)
    )
