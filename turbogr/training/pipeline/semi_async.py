"""Semi-asynchronous training: rows of a batch miss the updates of the last `staleness` batches before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.data.loader import Loader
from turbogr.tables.table import RowFlags, RowGradients
from turbogr.tables.working_set import WorkingSets
from turbogr.training.pipeline.executor import PendingBatch, ReducedGradients
from turbogr.training.pipeline.pipelined import ReadsAhead
from turbogr.training.pipeline.workers import MakeWorker, make_worker
from turbogr.training.step import Stepper
from turbogr.training.timeline import Timeline


class StalenessError(RuntimeError):
    """A look-up would see other updates than the schedule says; raised before it is made."""


class _Overwritten(NamedTuple):
    """Rows `slots` [n] and the values [n, d] that they had before an update."""

    slots: Tensor
    values: Tensor


class SemiAsync(ReadsAhead):
    """The first batches of an epoch miss fewer updates: an epoch starts with all updates done."""

    def __init__(
        self,
        stepper: Stepper,
        timeline: Timeline,
        depth: int,
        staleness: int,
        make_worker: MakeWorker = make_worker,
    ) -> None:
        self.ahead = staleness
        super().__init__(stepper, timeline, depth, make_worker)
        self._overwritten: deque[list[_Overwritten]] = deque(maxlen=staleness)
        """What the last updates of this epoch have overwritten, by group."""
        self._past: list[list[Tensor]] = []
        self._version = 0
        self._previous = [RowFlags(weight) for weight in stepper.tables.weights]
        self._has_previous = False

    def batches(self, loader: Loader, first: int, limit: int | None) -> Generator[PendingBatch, None, None]:
        if loader.state_dict()["step"] == 0:
            self._overwritten.clear()
        self._has_previous = False
        self._version, self._past = first, self.past_weights()
        yield from super().batches(loader, first, limit)

    def _wait(self, pending: PendingBatch) -> PendingBatch:
        pending = super()._wait(pending)
        # Counted over all ranks' parts of the batch, as in ExactOverlap, so that the two modes' rates compare.
        requests = pending.row_request.requests
        for group, request, flags in zip(self._tables["wait"].groups, requests, self._previous, strict=True):
            slots, uses = group.table.used_rows(request)
            if self._has_previous:
                pending.rows_read += slots.numel()
                pending.rows_shared += int(flags.of(slots).sum())
            flags.set(slots, uses)
        self._has_previous = True
        return pending

    def _read(self, pending: PendingBatch) -> list[Tensor]:
        oldest = self._first - len(self._past)
        version = max(pending.step - self.ahead, oldest)
        pending.staleness = self._checked_staleness(pending.step, version)
        weights = self._past[version - oldest] if version < self._first else None
        if weights is None:
            self._past = []
        return self._tables["embed"].fetch_rows(pending.row_request.requests, weights)

    def _checked_staleness(self, step: int, version: int) -> int:
        """Return how many updates rows of this version miss; checked also where Python leaves assertions out.

        Raises:
            StalenessError: the tables are at another version, or the rows would miss more than the config allows.
        """
        from_copy = version < self._first  # read from a copy that an interrupted run has left
        missing = step - (version if from_copy else self._version)
        if missing != step - version or missing > self.ahead:
            raise StalenessError(
                f"rows of step {step + 1} would miss {missing} updates instead of {step - version}, and "
                f"pipeline.staleness is {self.ahead}; the schedule is broken, which is a bug of TurboGR. The last "
                "checkpoint is sound: continue from it with --resume and pipeline.mode=sync"
            )
        return missing

    def fetch(self, pending: PendingBatch) -> WorkingSets:
        with self.timeline.span("main", "embed", pending.step):
            rows = self._wait_for(self._reads.pop(pending.step), pending)
        return self.stepper.tables.working_sets(pending.row_request, rows)

    def reduce(self, pending: PendingBatch, sets: WorkingSets) -> ReducedGradients:
        if self.stepper.config.optimizer.clip_norm is not None:
            return super().reduce(pending, sets)
        with self.timeline.span("main", "reduce", pending.step):
            self.stepper.gradients.start()
            self.stepper.gradients.finish()
        return ReducedGradients(None, False)

    def update(
        self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients, grad_norm: float, factor: float
    ) -> None:
        with self.timeline.span("main", "update", pending.step):
            if reduced.rows is not None:
                self.stepper.clip(reduced.rows, grad_norm)
            self.stepper.update_dense(factor)
        numbers = self.stepper.tables.begin_update()
        self._update_later(self._update_rows, pending, sets.gradients(), reduced.rows, factor, numbers)

    def _update_rows(
        self,
        pending: PendingBatch,
        grads: list[Tensor],
        rows: list[RowGradients] | None,
        factor: float,
        numbers: list[int],
    ) -> list[Tensor]:
        tables = self._tables["embed"]
        if rows is None:
            rows = tables.sum_gradients(pending.row_request.requests, grads)
        self._overwritten.append(
            [_Overwritten(part.slots, weight[part.slots]) for part, weight in zip(rows, tables.weights, strict=True)]
        )
        self.stepper.update_rows(rows, factor, numbers)
        self._version += 1
        return [part.slots for part in rows]

    def _update_nothing(self, pending: PendingBatch) -> list[Tensor]:
        slots = super()._update_nothing(pending)
        weights = self._tables["embed"].weights
        self._overwritten.append(
            [_Overwritten(part, weight[part]) for part, weight in zip(slots, weights, strict=True)]
        )
        self._version += 1
        return slots

    def past_weights(self) -> list[list[Tensor]]:
        found: list[list[Tensor]] = []
        weights = self.stepper.tables.weights
        for overwritten in reversed(self._overwritten):
            weights = [weight.clone() for weight in weights]
            for weight, (slots, values) in zip(weights, overwritten, strict=True):
                weight[slots] = values
            found.insert(0, weights)
        return found

    def restore_past_weights(self, versions: Sequence[Sequence[Tensor]]) -> None:
        self._overwritten.clear()
        for old, new in zip(versions, [*versions[1:], self.stepper.tables.weights], strict=False):
            self._overwritten.append([_difference(before, after) for before, after in zip(old, new, strict=True)])


def _difference(before: Tensor, after: Tensor) -> _Overwritten:
    """Return the rows in which two versions of a table differ, and their values before."""
    slots = (before.view(torch.int32) != after.view(torch.int32)).any(1).nonzero().flatten()
    return _Overwritten(slots, before[slots])
