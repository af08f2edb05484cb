"""A parallel map that keeps the order of its results, so that threads never change what is written."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Given], Result], inputs: Iterable[Given], threads: int
) -> Generator[Result, None, None]:
    """Yield function(x) for every input in order, computing up to `threads` of them at a time.

    At most `threads` + 1 inputs are taken ahead of the results, so a slow consumer stops the producer. An exception of
    the function is raised when its result is due.
    """
    if threads <= 1:
        yield from map(function, inputs)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="turbogr-prepare")
    waiting: deque[Future[Result]] = deque()
    try:
        for given in inputs:
            waiting.append(pool.submit(function, given))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def default_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
