"""All embedding tables of a run, by name.

Tables that have the same width, optimiser and learning rate form a group and live in one tensor, one behind the other.
An id then counts from its table's first row there, so one look-up serves all tables of a group: the distinct rows come
out sorted by table, and each table's rows are spread over all cores. With sharding, a group needs one exchange however
many tables it has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.config import OptimizerConfig
from turbogr.random import derive_seed
from turbogr.tables.row_optimizers import RowOptimizer, make_row_optimizer, tensors_per_table
from turbogr.tables.table import IdRange, RowGradients, RowRequest, Table
from turbogr.tables.working_set import BatchIds, BatchRequest, IndexRange, RowRange, WorkingSet, WorkingSets

ITEM = "item"
"""Name of the table of items, which every run has."""

_TABLE_SITE = 0x7AB1E

MakeTable = Callable[[int, int], Table]
"""Makes a table of (num_rows, dim)."""


@dataclass(frozen=True)
class TableSpec:
    """A named table: its size, and how its rows are trained."""

    name: str
    num_rows: int
    dim: int
    optimizer: str = "adam"
    lr: float = 1e-3

    @property
    def num_bytes(self) -> int:
        """Memory of the table and its optimiser's state in fp32."""
        return 4 * tensors_per_table(self.optimizer) * self.num_rows * self.dim


class PendingBatchIds(NamedTuple):
    """Ids of a batch on their way to their owners: `sent` by group; the rest as in `BatchRequest`."""

    sent: list[Any]
    ranges: dict[str, IndexRange]
    num_inputs: tuple[int, ...]
    in_loss: tuple[bool, ...]


class TableGroup:
    """Tables of the same width and optimiser in one tensor."""

    def __init__(self, specs: Sequence[TableSpec], make_table: MakeTable, config: OptimizerConfig) -> None:
        self.specs = tuple(specs)
        self.dim, self.lr = specs[0].dim, specs[0].lr
        self.first: dict[str, int] = {}
        num_rows = 0
        for spec in specs:
            self.first[spec.name] = num_rows
            num_rows += spec.num_rows
        self.table = make_table(num_rows, self.dim)
        self.optimizer: RowOptimizer = make_row_optimizer(specs[0].optimizer, self.table.weight, config)

    def range_of(self, spec: TableSpec) -> IdRange:
        return self.first[spec.name], spec.num_rows

    def update(self, rows: RowGradients, factor: float, number: int) -> None:
        """Update rows in the step of this number with `factor` times the learning rate."""
        self.optimizer.update(rows.slots, rows.grad, self.lr * factor, number)

    @property
    def title(self) -> str:
        """The tables' names, for messages."""
        return ", ".join(spec.name for spec in self.specs)


class EmbeddingTables:
    """The tables of a run. Methods that send or receive are collective over many ranks."""

    def __init__(self, specs: Iterable[TableSpec], make_table: MakeTable, config: OptimizerConfig) -> None:
        by_kind: dict[tuple[Any, ...], list[TableSpec]] = {}
        for spec in specs:
            by_kind.setdefault((spec.dim, spec.optimizer, spec.lr), []).append(spec)
        self.groups = tuple(TableGroup(members, make_table, config) for members in by_kind.values())
        self._group_of = {spec.name: number for number, group in enumerate(self.groups) for spec in group.specs}
        self._rows = {
            spec.name: RowRange(*group.range_of(spec), shared=len(group.specs) > 1)
            for group in self.groups
            for spec in group.specs
        }

    @property
    def specs(self) -> list[TableSpec]:
        return [spec for group in self.groups for spec in group.specs]

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_rows * spec.dim for spec in self.specs)

    @property
    def weights(self) -> list[Tensor]:
        """This process's rows of every group."""
        return [group.table.weight for group in self.groups]

    def over(self, channel: Any) -> EmbeddingTables:
        """Return these very tables, communicating over another channel of the mesh."""
        tables = copy.copy(self)
        tables.groups = tuple(copy.copy(group) for group in self.groups)
        for group in tables.groups:
            group.table = group.table.over(channel)  # type: ignore[attr-defined]
        return tables

    def draw(self, seed: int) -> None:
        """Draw all rows. A table's values depend on the seed, its name and its rows alone."""
        for group in self.groups:
            for spec in group.specs:
                group.table.draw(*group.range_of(spec), _seed_of(spec.name, seed))

    def assign(self, name: str, values: Tensor) -> None:
        """Set the first rows of a table to `values` [n, dim]."""
        group = self.groups[self._group_of[name]]
        group.table.assign(group.first[name], values)

    def clear(self, name: str) -> None:
        """Set all rows of a table to zero."""
        group = self.groups[self._group_of[name]]
        first, num_rows, _ = self._rows[name]
        slots, _ = group.table.held_rows(first, num_rows)
        group.table.weight.index_fill_(0, slots.to(group.table.weight.device), 0.0)

    def gather(self, name: str) -> Tensor:
        """Return the whole table [num_rows, dim] on every rank."""
        first, num_rows, _ = self._rows[name]
        return self.groups[self._group_of[name]].table.gather(first, num_rows)

    def gather_all(self) -> dict[str, Tensor]:
        """Return all tables by name, whole, on every rank."""
        return {spec.name: self.gather(spec.name) for spec in self.specs}

    # The stages of a step.

    def send_ids(self, ids: BatchIds) -> PendingBatchIds:
        """Find the distinct rows that a batch needs of every group and start to send them to their owners."""
        sent, ranges, num_inputs, in_loss = [], {}, [], []
        for number, group in enumerate(self.groups):
            named = [(spec, ids[spec.name]) for spec in group.specs if spec.name in ids]
            tensors, tables, places = _laid_out(group, number, named)
            sent.append(group.table.send_ids(tensors, None if len(group.specs) == 1 else tables))
            ranges.update(places)
            num_inputs.append(max((place.inputs.stop for place in places.values()), default=0))
            in_loss.append(any(len(needed.loss) for _, needed in named))
        return PendingBatchIds(sent, ranges, tuple(num_inputs), tuple(in_loss))

    def receive_ids(self, pending: PendingBatchIds) -> BatchRequest:
        """Wait until every owner has the ids."""
        requests = tuple(group.table.receive_ids(sent) for group, sent in zip(self.groups, pending.sent, strict=True))
        return BatchRequest(requests, pending.ranges, pending.num_inputs, pending.in_loss)

    def fetch_rows(self, requests: Sequence[RowRequest], weights: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Look up and exchange the rows of every group, as they are now or in `weights`."""
        return self.receive_rows(self.send_rows(requests, weights))

    def send_rows(self, requests: Sequence[RowRequest], weights: Sequence[Tensor] | None = None) -> list[Any]:
        """Look up the rows of every group and start to send them to the ranks that asked."""
        sources: Sequence[Tensor | None] = weights or [None] * len(self.groups)
        return [
            group.table.send_rows(request, weight)
            for group, request, weight in zip(self.groups, requests, sources, strict=True)
        ]

    def receive_rows(self, pending: Sequence[Any]) -> list[Tensor]:
        """Wait for the rows [R, d] of every group."""
        return [group.table.receive_rows(sent) for group, sent in zip(self.groups, pending, strict=True)]

    def working_sets(self, request: BatchRequest, rows: Sequence[Tensor]) -> WorkingSets:
        """Make the rows of a request leaves."""
        groups = [
            WorkingSet(part, tensor.requires_grad_()) for part, tensor in zip(request.requests, rows, strict=True)
        ]
        return WorkingSets(groups, request.ranges, self._rows)

    def fetch(self, ids: BatchIds) -> WorkingSets:
        """Return the working sets of a batch, all stages in turn."""
        request = self.receive_ids(self.send_ids(ids))
        return self.working_sets(request, self.fetch_rows(request.requests))

    def sum_gradients(self, requests: Sequence[RowRequest], grads: Sequence[Tensor]) -> list[RowGradients]:
        """Sum the gradients [R, d] of every group's rows over the ranks."""
        pending = [
            group.table.send_gradients(request, grad)
            for group, request, grad in zip(self.groups, requests, grads, strict=True)
        ]
        return [group.table.sum_gradients(sent) for group, sent in zip(self.groups, pending, strict=True)]

    def begin_update(self) -> list[int]:
        """Count a step with every optimiser and return its numbers."""
        return [group.optimizer.begin() for group in self.groups]

    def update(self, gradients: Sequence[RowGradients], factor: float, numbers: Sequence[int]) -> None:
        """Update rows of every group with `factor` times its learning rate."""
        for group, rows, number in zip(self.groups, gradients, numbers, strict=True):
            group.update(rows, factor, number)

    # Checkpoints.

    def state(self) -> dict[str, dict[str, Any]]:
        """Return every tensor by table: `weight`, and the optimiser's under `optimizer`.

        On one rank they are the tensors themselves, on many they are exchanged copies; see `adopt`.
        """
        return self._for_checkpoint(lambda group: {"weight": group.table.weight, "optimizer": group.optimizer.state()})

    def adopt(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the rows of a `state` that a checkpoint was loaded into."""
        for group in self.groups:
            for spec in group.specs:
                stored = state[spec.name]
                self._from_checkpoint(group, spec, stored["weight"], group.table.weight)
                for name, tensor in group.optimizer.state().items():
                    if tensor.dim():
                        self._from_checkpoint(group, spec, stored["optimizer"][name], tensor)

    def export_weights(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return other versions of the groups' weights by table, as `state` does."""
        return {
            spec.name: group.table.for_checkpoint(weight, *group.range_of(spec))
            for group, weight in zip(self.groups, weights, strict=True)
            for spec in group.specs
        }

    def import_weights(self, stored: Mapping[str, Tensor], weights: Sequence[Tensor]) -> None:
        """Copy what was loaded into the result of `export_weights` back into `weights`."""
        for group, weight in zip(self.groups, weights, strict=True):
            for spec in group.specs:
                self._from_checkpoint(group, spec, stored[spec.name], weight)

    def _for_checkpoint(self, tensors_of: Callable[[TableGroup], dict[str, Any]]) -> dict[str, dict[str, Any]]:
        def stored(group: TableGroup, spec: TableSpec, value: Any) -> Any:
            if isinstance(value, dict):
                return {name: stored(group, spec, part) for name, part in value.items()}
            return group.table.for_checkpoint(value, *group.range_of(spec)) if value.dim() else value

        return {spec.name: stored(group, spec, tensors_of(group)) for group in self.groups for spec in group.specs}

    def _from_checkpoint(self, group: TableGroup, spec: TableSpec, stored: Tensor, local: Tensor) -> None:
        group.table.from_checkpoint(stored, local, *group.range_of(spec))


def _laid_out(
    group: TableGroup, number: int, named: Sequence[tuple[TableSpec, Any]]
) -> tuple[list[Tensor], list[IdRange], dict[str, IndexRange]]:
    """Lay the ids of a group's tables out: all inputs first, then what only the loss reads."""
    tensors: list[Tensor] = []
    ranges: list[IdRange] = []
    slices: dict[str, list[slice]] = {}
    start = 0
    for kind in ("inputs", "loss"):
        for spec, ids in named:
            pieces = list(getattr(ids, kind))
            tensors += pieces
            ranges += [group.range_of(spec)] * len(pieces)
            stop = start + sum(piece.numel() for piece in pieces)
            slices.setdefault(spec.name, []).append(slice(start, stop))
            start = stop
    if not tensors:  # a batch that needs nothing of the group
        tensors, ranges = [torch.empty(0, dtype=torch.int64, device=group.table.weight.device)], [(0, 1)]
    counts = {spec.name: tuple(piece.numel() for piece in ids.inputs) for spec, ids in named}
    places = {name: IndexRange(number, inputs, loss, counts[name]) for name, (inputs, loss) in slices.items()}
    return tensors, ranges, places


def _seed_of(name: str, seed: int) -> int:
    """Return the seed of a table's initial values; that of the items has been the same in all releases."""
    if name == ITEM:
        return derive_seed(seed, _TABLE_SITE)
    return derive_seed(seed, _TABLE_SITE, *name.encode("utf-8"))
