"""Exact overlap: as semi-async one batch ahead, but every row is read after all earlier updates of it.

Only rows that two consecutive batches share are read late, and as late as that demands. Of these, a step waits for the
rows of its inputs; those that only its loss needs arrive while its forward pass runs (`WorkingSet.wait_for_loss_rows`).
Gradients that come from the loss alone are sent when the backward pass begins (`WorkingSet.on_gradient`). No row is
sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turbogr.data.loader import Loader
from turbogr.tables.table import RowFlags, RowGradients
from turbogr.tables.working_set import WorkingSets, gradient_of
from turbogr.training.pipeline.executor import PendingBatch, ReducedGradients
from turbogr.training.pipeline.pipelined import ReadsAhead
from turbogr.training.pipeline.row_parts import UNSHARED, RowParts, shared_kinds, split_request, used_rows
from turbogr.training.pipeline.workers import Job, MakeWorker, make_worker
from turbogr.training.step import Stepper
from turbogr.training.timeline import Timeline

_UpdateGroup = Callable[[int, RowGradients], Tensor]
"""Updates rows of a group, by its number, and returns their slots."""


class ExactOverlap(ReadsAhead):
    """The same weights as `sync`, bit for bit in its order of updates."""

    ahead = 1

    def __init__(self, stepper: Stepper, timeline: Timeline, depth: int, make_worker: MakeWorker = make_worker) -> None:
        super().__init__(stepper, timeline, depth, make_worker)
        self._previous: PendingBatch | None = None
        self._uses_before, self._kinds = ([RowFlags(weight) for weight in stepper.tables.weights] for _ in range(2))
        self._late: dict[int, Job] = {}
        self._early: dict[int, Job] = {}
        self._loss_grads: dict[int, dict[int, Tensor]] = {}

    def batches(self, loader: Loader, first: int, limit: int | None) -> Generator[PendingBatch, None, None]:
        self._previous, self._late, self._early, self._loss_grads = None, {}, {}, {}
        yield from super().batches(loader, first, limit)

    def _wait(self, pending: PendingBatch) -> PendingBatch:
        pending = super()._wait(pending)
        tables, request = self._tables["wait"], pending.row_request
        used = used_rows(tables, request)
        if self._previous is not None:
            kinds = [shared_kinds(u.uses, flags.of(u.slots)) for u, flags in zip(used, self._uses_before, strict=True)]
            pending.rows_read = sum(kind.numel() for kind in kinds)
            pending.rows_shared = sum(int((kind != UNSHARED).sum()) for kind in kinds)
            if pending.step > self._first:
                for flags, rows, kind in zip(self._kinds, used, kinds, strict=True):
                    flags.set(rows.slots, kind)
                self._previous.after = split_request(tables, self._previous.row_request, self._kinds)
                pending.before = split_request(tables, request, self._kinds)
        for flags, rows in zip(self._uses_before, used, strict=True):
            flags.set(*rows)
        self._previous = pending
        return pending

    def _read(self, pending: PendingBatch) -> list[Tensor]:
        tables, requests, parts = self._tables["embed"], pending.row_request.requests, pending.before
        if parts is None:
            return tables.fetch_rows(requests)
        rows = [
            group.table.weight.new_empty(request.ids.numel(), group.dim)
            for group, request in zip(tables.groups, requests, strict=True)
        ]
        found = tables.fetch_rows([part.unshared.request for part in parts])
        for tensor, part, values in zip(rows, parts, found, strict=True):
            tensor.index_copy_(0, part.unshared.places, values)
        return rows

    def fetch(self, pending: PendingBatch) -> WorkingSets:
        tables, parts = self.stepper.tables, pending.before
        with self.timeline.span("main", "embed", pending.step):
            sent = None if parts is None else tables.send_rows([part.for_inputs.request for part in parts])
            rows: list[Tensor] = self._wait_for(self._reads.pop(pending.step), pending)
            if parts is not None and sent is not None:
                for tensor, part, values in zip(rows, parts, tables.receive_rows(sent), strict=True):
                    tensor.index_copy_(0, part.for_inputs.places, values)
        sets = tables.working_sets(pending.row_request, rows)
        for number in self._loss_groups(pending):
            sets.groups[number].wait_for_loss_rows = partial(self._wait_for_loss_rows, pending)
            if self.stepper.config.optimizer.clip_norm is None:
                sets.groups[number].on_gradient = partial(self._on_loss_gradient, pending, number)
        return sets

    def _loss_groups(self, pending: PendingBatch) -> list[int]:
        """Return the numbers of the groups whose rows the loss reads."""
        return [number for number, read in enumerate(pending.row_request.in_loss) if read]

    def _wait_for_loss_rows(self, pending: PendingBatch) -> None:
        """Wait for the rows of a batch that its loss alone needs."""
        if pending.step in self._late:
            with self.timeline.span("main", "embed", pending.step):
                self._wait_for(self._late.pop(pending.step), pending)

    def _parts_after(self, pending: PendingBatch) -> list[RowParts] | None:
        """Wait until it is known what the next batch shares with this one, and return it."""
        if pending.step + 1 < self._end:
            self._wait_for(self._exchanged[pending.step + 1])
        return pending.after

    def _on_loss_gradient(self, pending: PendingBatch, number: int, grad: Tensor) -> None:
        """Start the early sums when the gradients of all groups that the loss reads are there.

        All groups' sums are one job, so that the order of messages does not depend on the order of the backward pass.
        """
        grads = self._loss_grads.setdefault(pending.step, {})
        grads[number] = grad
        if len(grads) == len(self._loss_groups(pending)):
            self._sum_early_later(pending, grads)

    def _sum_early_later(self, pending: PendingBatch, grads: dict[int, Tensor]) -> None:
        """Start to sum the gradients that are complete when the backward pass begins."""
        self._loss_grads.pop(pending.step, None)
        if self._parts_after(pending) is not None:
            self._early[pending.step] = self._workers["embed"].post(self._sum_early, pending.step, pending, grads)

    def _sum_early(self, pending: PendingBatch, grads: dict[int, Tensor]) -> dict[int, RowGradients]:
        assert pending.after is not None
        groups = self._tables["embed"].groups
        return {
            number: pending.after[number].early_for_loss.sum_gradients(groups[number].table, grad)
            for number, grad in sorted(grads.items())
        }

    def reduce(self, pending: PendingBatch, sets: WorkingSets) -> ReducedGradients:
        self._wait_for_loss_rows(pending)  # a rank without tokens has not computed a loss
        parts = self._parts_after(pending)
        if self.stepper.config.optimizer.clip_norm is not None:
            return super().reduce(pending, sets)
        if pending.step not in self._early:  # nor has it had a backward pass
            grads = {number: gradient_of(sets.groups[number].rows) for number in self._loss_groups(pending)}
            self._sum_early_later(pending, grads)
        with self.timeline.span("main", "reduce", pending.step):
            self.stepper.gradients.start()
            sent = None if parts is None else self._send_for_inputs(parts, sets.gradients())
            self.stepper.gradients.finish()
            return ReducedGradients(None if sent is None else self._sum_for_inputs(sent), False)

    def _send_for_inputs(self, parts: list[RowParts], grads: list[Tensor]) -> list[Any]:
        groups = self.stepper.tables.groups
        return [
            part.for_inputs.send_gradients(group.table, grad)
            for part, group, grad in zip(parts, groups, grads, strict=True)
        ]

    def _sum_for_inputs(self, sent: list[Any]) -> list[RowGradients]:
        groups = self.stepper.tables.groups
        return [group.table.sum_gradients(gradients) for group, gradients in zip(groups, sent, strict=True)]

    def update(
        self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients, grad_norm: float, factor: float
    ) -> None:
        if reduced.complete:
            super().update(pending, sets, reduced, grad_norm, factor)
            self._catch_up_later(pending, [], None)
            return
        numbers = self.stepper.tables.begin_update()
        with self.timeline.span("main", "update", pending.step):
            self.stepper.update_dense(factor)
            if reduced.rows is not None:
                self.stepper.update_rows(reduced.rows, factor, numbers)
        grads = sets.gradients()
        update = partial(self._update_group, factor, numbers)
        caught_up = self._catch_up_later(pending, grads, update)
        done = None if reduced.rows is None else [rows.slots for rows in reduced.rows]
        self._update_later(self._update_rest, pending, grads, update, done, caught_up)

    def skip(self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients) -> None:
        super().skip(pending, sets, reduced)
        self._catch_up_later(pending, [], None)

    def _update_group(self, factor: float, numbers: list[int], group: int, rows: RowGradients) -> Tensor:
        self.stepper.tables.groups[group].update(rows, factor, numbers[group])
        return rows.slots

    def _catch_up_later(self, pending: PendingBatch, grads: list[Tensor], update: _UpdateGroup | None) -> Job | None:
        """Start what the next batch's loss must wait for, but not its forward pass."""
        if pending.after is None:
            return None
        following = pending.step + 1
        self._late[following] = self._workers["embed"].post(
            self._catch_up,
            following,
            pending,
            self._exchanged[following],
            self._reads[following],
            self._early.pop(pending.step, None),
            grads,
            update,
        )
        return self._late[following]

    def _catch_up(
        self,
        pending: PendingBatch,
        following: PendingBatch,
        rows: list[Tensor],
        early: dict[int, RowGradients] | None,
        grads: list[Tensor],
        update: _UpdateGroup | None,
    ) -> dict[int, Tensor]:
        """Update the rows that the following batch's loss alone needs, send them, and put in what arrives.

        Without `update` they are updated already. Returns the slots updated here, by group.
        """
        assert pending.after is not None and following.before is not None
        tables = self._tables["embed"]
        updated: dict[int, Tensor] = {}
        for number in self._loss_groups(following):
            table = tables.groups[number].table
            if update is not None:
                assert early is not None
                slots = [update(number, early[number])]
                slots.append(update(number, pending.after[number].for_loss.sum_gradients(table, grads[number])))
                updated[number] = torch.cat(slots)
            parts = following.before[number].early_for_loss, following.before[number].for_loss
            sent = [table.send_rows(part.request) for part in parts]
            for part, pending_rows in zip(parts, sent, strict=True):
                rows[number].detach().index_copy_(0, part.places, table.receive_rows(pending_rows))
        return updated

    def _update_rest(
        self,
        pending: PendingBatch,
        grads: list[Tensor],
        update: _UpdateGroup,
        done: list[Tensor] | None,
        caught_up: dict[int, Tensor] | None,
    ) -> list[Tensor]:
        tables = self._tables["embed"]
        if pending.after is None:
            summed = tables.sum_gradients(pending.row_request.requests, grads)
            return [update(number, rows) for number, rows in enumerate(summed)]
        assert caught_up is not None and done is not None
        updated = []
        for number, (group, parts) in enumerate(zip(tables.groups, pending.after, strict=True)):
            slots = update(number, parts.unshared.sum_gradients(group.table, grads[number]))
            updated.append(torch.cat([slots, *([caught_up[number]] if number in caught_up else []), done[number]]))
        return updated
