"""Jobs on several threads, where each job uses one thread.

A matrix product may round differently on another number of threads. Jobs therefore run in parallel, but never use
several threads inside: a job's digits are the same on a laptop, on a server, and on one of several ranks of a machine.
For many small products this is also faster than threads that synchronise after each product.
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
Step = Callable[[int], None]  # a job calls it with the number of users it has finished; it raises to stop the job

_POLL_SECONDS = 0.05


class Interrupted(Exception):
    """Long work was stopped before it was complete. Nothing was written."""


def run_jobs(
    work: Callable[[Job, Step], Result],
    jobs: Iterable[Job],
    *,
    num_workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Generator[Result, None, None]:
    """Yield work(job, step) for every job, in the order of `jobs`; only a few jobs are read ahead.

    `num_workers` is PyTorch's number of threads unless given. `progress` (with the number of users since its last call)
    and `should_stop` are called from the caller's thread only, several times a second. Gradients are off in `work`.

    Raises:
        Interrupted: `should_stop` returned True. Running jobs end at their next step, as they do when the caller stops
            iterating or an exception is raised.
    """
    num_workers = num_workers or torch.get_num_threads()
    counter = _UserCounter()

    def run(job: Job) -> Result:
        with torch.no_grad():
            return work(job, counter.step)

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
                counter.report(progress)
                if should_stop is not None and should_stop():
                    raise Interrupted("interrupted before all users were done")
            yield future.result()
    finally:
        counter.stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _UserCounter:
    """Number of users done, counted on the jobs' threads and reported on the caller's."""

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
    """Start threads that each run PyTorch operations single-threaded; the caller's number of threads is unchanged."""
    num_threads = torch.get_num_threads()
    ready = threading.Barrier(num_workers + 1)

    def start() -> None:
        # PyTorch reads the process-wide number at a thread's first use; using it here makes that happen now.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="turbogr-evaluate", initializer=start)
    for _ in range(num_workers):
        pool.submit(int)
    ready.wait()
    # The workers' calls changed the process-wide number, which counts for future threads only.
    torch.set_num_threads(num_threads)
    return pool
