"""Workers load later batches and exchange their ids; rows are read after every earlier update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor

from turbogr.data.loader import Loader
from turbogr.parallel.mesh import Mesh
from turbogr.tables.embedding_tables import EmbeddingTables
from turbogr.tables.working_set import WorkingSets
from turbogr.training.pipeline.executor import PendingBatch, ReducedGradients, num_batches_left
from turbogr.training.pipeline.serial import Serial
from turbogr.training.pipeline.workers import Job, MakeWorker, make_worker
from turbogr.training.step import Stepper
from turbogr.training.timeline import Timeline


class Pipelined(Serial):
    """At most `depth` batches are in flight, from being loaded to being learnt.

    Every thread communicates over a channel of its own. Batches enter the pipeline one by one as steps end, so the
    messages on a channel have the same order on all ranks.
    """

    ahead = 0
    """How many batches ahead of the step rows are read."""

    def __init__(self, stepper: Stepper, timeline: Timeline, depth: int, make_worker: MakeWorker = make_worker) -> None:
        super().__init__(stepper, timeline, make_worker)
        self.depth = depth
        self._channels: list[Mesh] = []
        names = ["load", "exchange", "wait", *(["embed"] if self.ahead else [])]
        self._tables = {name: self._tables_for(name) for name in names}
        self._exchanged: dict[int, Job] = {}
        self._first = self._end = 0

    def _tables_for(self, worker: str) -> EmbeddingTables:
        """Return the tables, over a channel of the worker's own where it communicates."""
        tables, mesh = self.stepper.tables, self.stepper.mesh
        if worker == "load" or mesh.world.size == 1:
            return tables
        self._channels.append(mesh.channel())
        return tables.over(self._channels[-1])

    def batches(self, loader: Loader, first: int, limit: int | None) -> Generator[PendingBatch, None, None]:
        self._start_workers(list(self._tables))
        self._exchanged = {}
        self._first, self._end = first, first + num_batches_left(loader, limit)
        position = loader.state_dict()
        # A resumed run exchanges the ids of the batch before once more, to find what the two share.
        extra = 1 if self.ahead and position["step"] and self._end > first else 0
        for step in range(first - extra, min(first + self.depth, self._end)):
            self._admit(loader, position, step)
        for step in range(first, min(first + self.ahead + 1, self._end)):
            self._read_ahead(step)
        for step in range(first, self._end):
            pending = self._wait_for(self._exchanged[step])
            loader.load_state_dict(pending.position)
            yield pending
            del self._exchanged[step]
            if step + self.depth < self._end:
                self._admit(loader, position, step + self.depth)
            if step + 1 + self.ahead < self._end:
                self._read_ahead(step + 1 + self.ahead)

    def _admit(self, loader: Loader, position: dict[str, int], step: int) -> None:
        """Let a batch into the pipeline."""
        loaded = self._load_later(loader, position, step - self._first, step)
        sent = self._workers["exchange"].post(self._exchange, step, loaded)
        self._exchanged[step] = self._workers["wait"].post(self._wait, step, sent)

    def _read_ahead(self, step: int) -> None:
        """Start to read the rows of a batch, where this mode does that."""

    def _exchange(self, pending: PendingBatch) -> PendingBatch:
        pending.ids = self._tables["exchange"].send_ids(self.stepper.ids(pending.batch))
        pending.ids_sent = time.perf_counter()
        return pending

    def _wait(self, pending: PendingBatch) -> PendingBatch:
        assert pending.ids is not None
        pending.request = self._tables["wait"].receive_ids(pending.ids)
        return pending

    def _wait_for(self, job: Job, pending: PendingBatch | None = None) -> Any:
        """Return the result of a job for the main thread.

        Waiting counts as communication from the moment when the batch's ids were sent. Without other ranks nothing is
        communicated, and all waiting is idle time.
        """
        started = time.perf_counter()
        result = job.result()
        ended = time.perf_counter()
        ids_sent = (pending or result).ids_sent if self.stepper.mesh.world.size > 1 else ended
        idle = min(max(ids_sent, started), ended) - started
        self.idle += idle
        self.exposed += ended - started - idle
        return result

    def fetch(self, pending: PendingBatch) -> WorkingSets:
        tables, request = self.stepper.tables, pending.row_request
        with self.timeline.span("main", "embed", pending.step):
            return tables.working_sets(request, tables.fetch_rows(request.requests))

    def _cut_connections(self) -> None:
        for channel in self._channels:
            channel.abort()


class ReadsAhead(Pipelined):
    """A worker reads rows of later batches and, between these reads, updates rows of earlier batches.

    This worker alone reads early and updates, in the order of its jobs; beside it, the main thread touches only rows
    that the worker does not.
    """

    def __init__(self, stepper: Stepper, timeline: Timeline, depth: int, make_worker: MakeWorker = make_worker) -> None:
        super().__init__(stepper, timeline, depth, make_worker)
        self._reads: dict[int, Job] = {}
        self._updates: deque[Job] = deque()

    def batches(self, loader: Loader, first: int, limit: int | None) -> Generator[PendingBatch, None, None]:
        self._reads, self._updates = {}, deque()
        yield from super().batches(loader, first, limit)

    def _read_ahead(self, step: int) -> None:
        self._reads[step] = self._workers["embed"].post(self._read, step, self._exchanged[step])

    def _read(self, pending: PendingBatch) -> list[Tensor]:
        """Read rows of a batch by group, in the worker."""
        raise NotImplementedError

    def _update_later(self, work: Callable[..., list[Tensor]], pending: PendingBatch, *arguments: Any) -> None:
        """Start an update of rows, which returns the slots that it updates, by group."""
        self._updates.append(self._workers["embed"].post(work, pending.step, pending, *arguments))

    def skip(self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients) -> None:
        self.stepper.drop_gradients()
        self._update_later(self._update_nothing, pending)

    def _update_nothing(self, pending: PendingBatch) -> list[Tensor]:
        return self._no_slots()

    def is_complete(self) -> bool:
        return all(job.succeeded() for job in self._updates)

    def finish_updates(self) -> None:
        while self._updates:
            self.updated = self._updates[0].result()
            self._updates.popleft()  # one that has failed stays: the updates are not complete

    def close(self) -> None:
        self.finish_updates()
        super().close()
