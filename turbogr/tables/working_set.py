"""What a batch needs of the tables: ids by table name on the way in, rows as leaf tensors on the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops import look_up_rows, unique_rows
from turbogr.streams import upload
from turbogr.tables.table import RowRequest, Table


class TableIds(NamedTuple):
    """Ids that a batch needs of one table: what its forward pass reads, and what only its loss reads."""

    inputs: Sequence[Tensor]
    loss: Sequence[Tensor] = ()


BatchIds = Mapping[str, TableIds]
"""What a batch needs of every table, by the table's name."""


class IndexRange(NamedTuple):
    """Where the ids of one table stand in the `index` of its group's request; `counts`: ids of each input tensor."""

    group: int
    inputs: slice
    loss: slice
    counts: tuple[int, ...] = ()


class RowRange(NamedTuple):
    """The rows of one table in its group's tensor; `shared` if the tensor holds other tables too."""

    first: int
    num_rows: int
    shared: bool


@dataclass(frozen=True)
class BatchRequest:
    """The rows that a batch needs of all tables: a request for every group, and where each table's ids are in it.

    The first `num_inputs[g]` entries of a group's index are inputs. `in_loss[g]` says whether the loss reads rows of
    the group, which is the same on all ranks, also on one without a token.
    """

    requests: tuple[RowRequest, ...]
    ranges: Mapping[str, IndexRange]
    num_inputs: tuple[int, ...]
    in_loss: tuple[bool, ...]


@dataclass
class WorkingSet:
    """The rows [R, d] of one group that a batch needs, as a leaf whose gradient is the sum over all uses of each row.

    Rows that no input of the batch uses may arrive late: `wait_for_loss_rows` returns when they are there.
    `on_gradient` gets the gradient [R, d] of what the loss reads as soon as the backward pass has it.
    """

    request: RowRequest
    rows: Tensor
    wait_for_loss_rows: Callable[[], object] | None = None
    on_gradient: Callable[[Tensor], None] | None = None
    _rows_for_loss: Tensor | None = field(default=None, repr=False)

    @property
    def ids(self) -> Tensor:
        return self.request.ids

    @property
    def index(self) -> Tensor:
        return self.request.index

    def rows_for_loss(self) -> Tensor:
        """Return `rows` when all of them are there; the loss must use this tensor."""
        if self._rows_for_loss is None:
            if self.wait_for_loss_rows is not None:
                self.wait_for_loss_rows()
            rows = self.rows
            if self.on_gradient is not None:
                rows = rows.view_as(rows)
                rows.register_hook(self.on_gradient)  # type: ignore[no-untyped-call]
            self._rows_for_loss = rows
        return self._rows_for_loss


class FetchedTable:
    """The rows of one table that a batch needs.

    Tables of equal width share their tensors, so `rows` may hold rows of other tables too; the indices point at the
    right ones.
    """

    def __init__(self, working_set: WorkingSet, index: IndexRange, rows: RowRange) -> None:
        self._set, self._range = working_set, index
        self._base, self._num_rows, self._shares_rows = rows

    def for_inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows on a device, and the index into them of this table's input ids, in the order they were given."""
        return on_device(self._set.rows, self._set.request.index[self._range.inputs], device)

    def for_loss(self) -> tuple[Tensor, Tensor]:
        """Return rows, and the index into them of the ids that only the loss reads, in the order they were given."""
        return self._set.rows_for_loss(), self._set.request.index[self._range.loss]

    def ids(self) -> Tensor:
        """Return the id in this table of every row of `rows`, [R]; rows of other tables get an arbitrary one."""
        ids = self._set.request.ids
        return (ids - self._base).clamp_(0, self._num_rows - 1) if self._shares_rows else ids


class WorkingSets:
    """The working sets of a batch, by group in `groups`, and by table name as `sets["item"]`."""

    def __init__(
        self, groups: Sequence[WorkingSet], ranges: Mapping[str, IndexRange], rows: Mapping[str, RowRange]
    ) -> None:
        self.groups = tuple(groups)
        self._ranges, self._rows = ranges, rows

    def __getitem__(self, name: str) -> FetchedTable:
        index = self._ranges[name]
        return FetchedTable(self.groups[index.group], index, self._rows[name])

    def look_up_inputs(self, names: Iterable[str], device: torch.device) -> dict[str, list[Tensor]]:
        """Return the vectors [n, d] of every tensor of input ids by table, with one look-up for all tables of a group.

        The gradient of the rows is then one tensor however many tensors of ids there are.
        """
        found: dict[str, list[Tensor]] = {}
        ranges = {name: self._ranges[name] for name in names}
        for number, working_set in enumerate(self.groups):
            named = [(name, index) for name, index in ranges.items() if index.group == number]
            if not named:
                continue
            positions = torch.cat([working_set.index[index.inputs] for _, index in named])
            rows, positions = on_device(working_set.rows, positions, device)
            vectors = iter(look_up_rows(rows, positions, [count for _, index in named for count in index.counts]))
            found.update((name, list(islice(vectors, len(index.counts)))) for name, index in named)
        return found

    def without_hooks(self) -> WorkingSets:
        """Return the same rows, all of them there, as new leaves that nobody waits for or listens to."""
        groups = [WorkingSet(group.request, group.rows.detach().requires_grad_()) for group in self.groups]
        return WorkingSets(groups, self._ranges, self._rows)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every group's rows."""
        return [gradient_of(group.rows) for group in self.groups]


def fetch_rows(table: Table, ids: Sequence[Tensor]) -> WorkingSet:
    """Return the working set of `ids` in a single table, all stages in turn."""
    request = table.receive_ids(table.send_ids(ids))
    return WorkingSet(request, table.receive_rows(table.send_rows(request)).requires_grad_())


def on_device(rows: Tensor, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and an index [n] into them on a device; from another device only the rows used are copied."""
    if rows.device == device:
        return rows, upload(index, device) if index.device != device else index
    used, places = unique_rows(index.to(rows.device).contiguous(), rows.shape[0])
    return rows.index_select(0, used).to(device, non_blocking=True), upload(places, device)


def gradient_of(rows: Tensor) -> Tensor:
    """Return the gradient of `rows`, zeros where no token has used them."""
    return torch.zeros_like(rows) if rows.grad is None else rows.grad
