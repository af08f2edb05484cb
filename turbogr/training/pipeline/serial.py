"""One batch at a time: the definition of `sync`. Only loading runs ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from turbogr.data.loader import Loader
from turbogr.tables.working_set import WorkingSets
from turbogr.training.pipeline.executor import PendingBatch, ReducedGradients, num_batches_left
from turbogr.training.pipeline.workers import Job, MakeWorker, Worker, make_worker
from turbogr.training.step import Measured, Stepper
from turbogr.training.timeline import Timeline

_LOADED_AHEAD = 2


class Serial:
    """See `Executor`."""

    def __init__(self, stepper: Stepper, timeline: Timeline, make_worker: MakeWorker = make_worker) -> None:
        self.stepper, self.timeline = stepper, timeline
        self.idle = self.exposed = 0.0
        self.updated: list[Tensor] = []
        self._make_worker = make_worker
        self._workers: dict[str, Worker] = {}

    def _start_workers(self, names: Sequence[str]) -> None:
        self._workers = {name: self._make_worker(name, self.stepper.device, self.timeline) for name in names}

    def _load_later(self, loader: Loader, position: dict[str, int], ahead: int, step: int) -> Job:
        """Start to load the batch that comes `ahead` batches after a position of the loader."""
        place = {"epoch": position["epoch"], "step": position["step"] + ahead}
        return self._workers["load"].post(self._load, step, loader, place, step)

    def _load(self, loader: Loader, place: dict[str, int], step: int) -> PendingBatch:
        """Read a batch and draw what its loss needs; every mode does both here, in the worker that loads."""
        return PendingBatch(step, self.stepper.load(loader, place, step), loader.position_after(**place))

    def batches(self, loader: Loader, first: int, limit: int | None) -> Generator[PendingBatch, None, None]:
        self._start_workers(["load"])
        position, count = loader.state_dict(), num_batches_left(loader, limit)
        jobs: deque[Job] = deque()
        for number in range(count):
            while len(jobs) <= _LOADED_AHEAD and number + len(jobs) < count:
                ahead = number + len(jobs)
                jobs.append(self._load_later(loader, position, ahead, first + ahead))
            started = time.perf_counter()
            pending: PendingBatch = jobs.popleft().result()
            self.idle += time.perf_counter() - started
            loader.load_state_dict(pending.position)
            yield pending

    def fetch(self, pending: PendingBatch) -> WorkingSets:
        with self.timeline.span("main", "embed", pending.step):
            return self.stepper.fetch(pending.batch)

    def reduce(self, pending: PendingBatch, sets: WorkingSets) -> ReducedGradients:
        with self.timeline.span("main", "reduce", pending.step):
            return ReducedGradients(self.stepper.reduce(sets), True)

    def measure(
        self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients, loss: Tensor, stop_signal: int
    ) -> Measured:
        complete = reduced.rows is not None and reduced.complete
        grads = [rows.grad for rows in reduced.rows or ()] if complete else sets.gradients()
        with self.timeline.span("main", "agree", pending.step):
            return self.stepper.agree(
                loss,
                grads,
                stop_signal,
                summed=reduced.complete,
                rows_read=pending.rows_read,
                rows_shared=pending.rows_shared,
            )

    def update(
        self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients, grad_norm: float, factor: float
    ) -> None:
        assert reduced.rows is not None
        with self.timeline.span("main", "update", pending.step):
            self.stepper.update(reduced.rows, grad_norm, factor)
        self.updated = [rows.slots for rows in reduced.rows]

    def skip(self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients) -> None:
        self.stepper.drop_gradients()
        self.updated = self._no_slots()

    def _no_slots(self) -> list[Tensor]:
        """Return the slots of an update that changes nothing, by group."""
        return [torch.empty(0, dtype=torch.int64, device=weight.device) for weight in self.stepper.tables.weights]

    def is_complete(self) -> bool:
        return True

    def finish_updates(self) -> None: ...

    def past_weights(self) -> list[list[Tensor]]:
        return []

    def restore_past_weights(self, versions: Sequence[Sequence[Tensor]]) -> None: ...

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers = {}

    def abandon(self) -> None:
        for worker in self._workers.values():
            worker.abandon()
        self._cut_connections()
        for worker in self._workers.values():
            worker.wait_a_little()
        self._workers = {}

    def _cut_connections(self) -> None:
        """Let workers that wait for other ranks fail."""
