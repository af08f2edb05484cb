"""Concurrent requests are computed together: one thread takes all that wait, so batches grow with the load.

Nothing waits for a batch to fill: a single request is computed at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

Compute = Callable[[Sequence[Any]], list[Any]]
"""Takes the jobs of a batch and returns a result, or an exception to raise, for each."""


class Overloaded(Exception):
    """Too many requests wait already."""


@dataclass(frozen=True)
class _Waiting:
    job: Any
    size: int
    answer: asyncio.Future[Any]


class RequestQueue:
    """Computes jobs in batches of at most `most_at_once` in size, unless a single one is larger."""

    def __init__(self, compute: Compute, *, most_at_once: int = 64, most_waiting: int = 1024) -> None:
        self._compute, self._most_at_once, self._most_waiting = compute, most_at_once, most_waiting
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turbogr-recommend")
        self._worker: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, job: Any, size: int = 1) -> Any:
        """Return the result of a job.

        Raises:
            Overloaded: too many wait.
            Exception: what the computation returned as the job's error.
        """
        if len(self._waiting) >= self._most_waiting:
            raise Overloaded
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(job, size, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def close(self) -> None:
        """Compute what waits, then end."""
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._take()
            try:
                results = await loop.run_in_executor(self._thread, self._compute, [one.job for one in batch])
            except Exception as error:
                results = [error] * len(batch)
            for one, result in zip(batch, results, strict=True):
                if one.answer.done():  # the client has gone
                    continue
                if isinstance(result, Exception):
                    one.answer.set_exception(result)
                else:
                    one.answer.set_result(result)

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and (not batch or size + self._waiting[0].size <= self._most_at_once):
            one = self._waiting.popleft()
            if not one.answer.done():
                batch.append(one)
                size += one.size
        return batch
