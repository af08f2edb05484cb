"""Jobs on several threads, each of which computes alone.

A matrix product may round differently on another number of threads. Parallelism is therefore between jobs and never
inside one: a job computes on a single thread, so its digits are the same on a laptop, on a server, and on one of many
ranks that share a machine. It is also faster for many small products than threads that meet after each.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")
Step = Callable[[int], None]  # a job calls it with the number of users it finished; it raises once the job is to end

_POLL_SECONDS = 0.05


class Interrupted(Exception):
    """Long work was asked to stop before it was complete; it has changed nothing."""


def run_jobs(
    work: Callable[[Job, Step], Result],
    jobs: Iterable[Job],
    *,
    num_workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Generator[Result, None, None]:
    """Yield work(job, step) of every job in the order of `jobs`, which is read only a little ahead.

    `num_workers` is PyTorch's number of threads unless given. `progress` (with the number of users since its last call)
    and `should_stop` are called from the caller's thread only, several times a second. Gradients are off in `work`.

    Raises:
        Interrupted: `should_stop` returned True. Jobs under way end at their next step, as they do when the caller
            stops iterating or an exception passes.
    """
    num_workers = num_workers or torch.get_num_threads()
    tally = _Tally()

    def run(job: Job) -> Result:
        with torch.no_grad():
            return work(job, tally.step)

    pool = _pool(num_workers)
    waiting: deque[Future[Result]] = deque()
    remaining = iter(jobs)
    try:
        while True:
            for job in remaining:
                waiting.append(pool.submit(run, job))
                if len(waiting) >= 2 * num_workers:
                    break
            if not waiting:
                break
            future = waiting.popleft()
            done = False
            while not done:
                done = bool(concurrent.futures.wait([future], timeout=_POLL_SECONDS).done)
                tally.report(progress)
                if should_stop is not None and should_stop():
                    raise Interrupted("interrupted before all users were done")
            yield future.result()
    finally:
        tally.stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _Tally:
    """What the jobs have done, counted on their threads and reported on the caller's."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._done = 0

    def step(self, num_users: int) -> None:
        if self.stopped.is_set():
            raise Interrupted
        with self._lock:
            self._done += num_users

    def report(self, progress: Callable[[int], None] | None) -> None:
        with self._lock:
            done, self._done = self._done, 0
        if progress is not None and done:
            progress(done)


def _pool(num_workers: int) -> ThreadPoolExecutor:
    """Start threads on which every operation of PyTorch runs on that thread alone; the caller's setting stays."""
    num_threads = torch.get_num_threads()
    ready = threading.Barrier(num_workers + 1)

    def start() -> None:
        # PyTorch adopts the process-wide number on a thread's first use and would do so later if it were not used here.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="turbogr-evaluate", initializer=start)
    for _ in range(num_workers):
        pool.submit(int)
    ready.wait()
    # Setting it on the workers changed the process-wide number for threads to come, but not that of running threads.
    torch.set_num_threads(num_threads)
    return pool
