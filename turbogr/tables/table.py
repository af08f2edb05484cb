"""One tensor of embedding rows, and what a training step asks of it.

A step does not look up row by row: it collects every id the batch needs, removes duplicates, fetches those rows once,
and hands their gradients back once. `Table` is that protocol in stages, so that a pipeline can start a stage early.
`LocalTable` keeps all rows in this process; `turbogr.parallel.sharded_table.ShardedTable` spreads them over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from turbogr.ops import prefer_huge_pages, random_integers, unique_rows
from turbogr.streams import upload

_ROWS_AT_ONCE = 4096
_STD = 0.02
_LEVELS = 2**24

IdRange = tuple[int, int]
"""(first row, number of rows) that the ids of one tensor count from."""


@dataclass(frozen=True)
class RowRequest:
    """The distinct rows that a batch needs.

    `ids` [R] are the rows, sorted by the rank that owns them; `index` [n] int32 gives the place in `ids` of every id
    asked for. `slots` [Q] are the rows of this process's `weight` that ranks ask for, sorted by who asks. This process
    asks each owner for `num_requested` rows and is asked for `num_owned` by each; alone it asks itself.

    All ids come from the host and are worked on there. Where the rows are on an accelerator, these tensors are copies
    there, and `on_host` is the request in host memory.
    """

    ids: Tensor
    index: Tensor
    slots: Tensor
    num_requested: list[int]
    num_owned: list[int]
    on_host: RowRequest | None = None

    @property
    def at_hand(self) -> RowRequest:
        """This request in host memory, for what is computed from ids alone."""
        return self if self.on_host is None else self.on_host

    def to(self, device: torch.device) -> RowRequest:
        """Return the request on the device of the rows, which keeps this one, in host memory."""
        if device.type == "cpu":
            return self
        ids, index = upload(self.ids, device), upload(self.index, device)
        slots = ids if self.slots is self.ids else upload(self.slots, device)
        return RowRequest(ids, index, slots, self.num_requested, self.num_owned, self)


class RowGradients(NamedTuple):
    """Gradients [R, d] of the distinct rows `slots` [R] of `weight`."""

    slots: Tensor
    grad: Tensor


class UsedRows(NamedTuple):
    """Distinct rows `slots` [n] of `weight` that some rank's batch uses.

    `uses` [n] uint8: 2 if any rank uses the row as an input, else 1.
    """

    slots: Tensor
    uses: Tensor


class Table(Protocol):
    """What training needs of a table; `weight` holds the rows of this process.

    Over many ranks every method that sends or receives is collective: all ranks call it in the same order.
    """

    weight: Tensor

    @property
    def num_rows(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def draw(self, first: int, num_rows: int, seed: int) -> None:
        """Draw `num_rows` rows from row `first` on, as a function of (seed, row - first)."""
        ...

    def assign(self, first: int, values: Tensor) -> None:
        """Set the rows from `first` on to `values` [n, dim]."""
        ...

    def held_rows(self, first: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return this process's slots of rows first, first + 1, ..., and which of them they are, counted from 0."""
        ...

    def gather(self, first: int, num_rows: int) -> Tensor:
        """Return `num_rows` rows from row `first` on, whole, on every rank."""
        ...

    def for_checkpoint(self, local: Tensor, first: int, num_rows: int) -> Tensor:
        """Return rows of `local` [as weight, ...] as a checkpoint stores them, in the order of the table."""
        ...

    def from_checkpoint(self, stored: Tensor, local: Tensor, first: int, num_rows: int) -> None:
        """Copy what was loaded into the result of `for_checkpoint` back into `local`."""
        ...

    def send_ids(self, ids: Sequence[Tensor], ranges: Sequence[IdRange] | None = None) -> Any:
        """Find the distinct rows of `ids` (int64 or int32, duplicates allowed) and start to send them to their owners.

        With `ranges`, the ids of each tensor count from its range's first row and must stay within the range.

        Raises:
            ValueError: an id outside the table or its range.
        """
        ...

    def receive_ids(self, pending: Any) -> RowRequest:
        """Wait until every owner has the ids."""
        ...

    def send_rows(self, request: RowRequest, weight: Tensor | None = None) -> Any:
        """Look the rows up as they are now, or in `weight`, and start to send them to the ranks that asked."""
        ...

    def receive_rows(self, pending: Any) -> Tensor:
        """Wait for the rows [R, d]."""
        ...

    def send_gradients(self, request: RowRequest, grad: Tensor) -> Any:
        """Start to send gradients [R, d] to the owners of the rows."""
        ...

    def sum_gradients(self, pending: Any) -> RowGradients:
        """Wait, and sum the gradients of every row of `weight` that any rank's batch uses."""
        ...

    def used_rows(self, request: RowRequest, inputs: Tensor | None = None) -> UsedRows:
        """Return the rows of `weight` that any rank's request has; `inputs` [R] bool marks inputs of the batch."""
        ...

    def flags_for_requesters(self, request: RowRequest, flags: Tensor) -> Tensor:
        """Turn a flag for each of the `slots` [Q] into one for each of the `ids` [R] of the ranks that asked."""
        ...

    def subset(self, request: RowRequest, requested: Tensor, owned: Tensor) -> RowRequest:
        """Return the request for those rows alone that `requested` [R] marks, and at their owners `owned` [Q].

        `index` stays that of the whole request.
        """
        ...


class LocalTable:
    """`weight` [num_rows, dim] in this process; values are those that memory held until `draw` or `assign`."""

    def __init__(self, num_rows: int, dim: int, *, device: torch.device | str = "cpu") -> None:
        self.weight = torch.empty(num_rows, dim, device=device)
        prefer_huge_pages(self.weight)

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        return self.weight.shape[1]

    def draw(self, first: int, num_rows: int, seed: int) -> None:
        draw_rows(self.weight[first : first + num_rows], torch.arange(num_rows), seed)

    def assign(self, first: int, values: Tensor) -> None:
        self.weight[first : first + values.shape[0]].copy_(values)

    def held_rows(self, first: int, num_rows: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(num_rows)
        return rows + first, rows

    def gather(self, first: int, num_rows: int) -> Tensor:
        return self.weight[first : first + num_rows]

    def for_checkpoint(self, local: Tensor, first: int, num_rows: int) -> Tensor:
        return local[first : first + num_rows]

    def from_checkpoint(self, stored: Tensor, local: Tensor, first: int, num_rows: int) -> None:
        """Nothing to do: `for_checkpoint` returns the rows themselves."""

    def send_ids(self, ids: Sequence[Tensor], ranges: Sequence[IdRange] | None = None) -> RowRequest:
        distinct, index = unique_rows(ids, self.num_rows, ranges)
        count = [distinct.numel()]
        return RowRequest(distinct, index, distinct, count, count)

    def receive_ids(self, pending: RowRequest) -> RowRequest:
        return pending.to(self.weight.device)

    def send_rows(self, request: RowRequest, weight: Tensor | None = None) -> Tensor:
        return (self.weight if weight is None else weight).index_select(0, request.slots)

    def receive_rows(self, pending: Tensor) -> Tensor:
        return pending

    def send_gradients(self, request: RowRequest, grad: Tensor) -> RowGradients:
        return RowGradients(request.slots, grad)

    def sum_gradients(self, pending: RowGradients) -> RowGradients:
        return pending

    def used_rows(self, request: RowRequest, inputs: Tensor | None = None) -> UsedRows:
        request = request.at_hand
        uses = torch.ones(request.slots.shape, dtype=torch.uint8, device=request.slots.device)
        return UsedRows(request.slots, uses if inputs is None else uses + inputs.to(torch.uint8))

    def flags_for_requesters(self, request: RowRequest, flags: Tensor) -> Tensor:
        return flags

    def subset(self, request: RowRequest, requested: Tensor, owned: Tensor) -> RowRequest:
        request = request.at_hand
        chosen = request.ids[requested]
        count = [chosen.numel()]
        return RowRequest(chosen, request.index, chosen, count, count).to(self.weight.device)


class RowFlags:
    """A byte for every row of a table, 0 except for the rows of one batch; in host memory, as ids are.

    Setting and reading cost time for the rows of a batch, never for the whole table.
    """

    def __init__(self, weight: Tensor) -> None:
        self._flags = torch.zeros(weight.shape[0], dtype=torch.uint8)
        self._slots = torch.empty(0, dtype=torch.int64)

    def set(self, slots: Tensor, flags: Tensor) -> None:
        """Flag the distinct rows `slots` [n] with `flags` [n], and no others."""
        self._flags[self._slots] = 0
        self._flags[slots] = flags
        self._slots = slots

    def of(self, slots: Tensor) -> Tensor:
        """Return the flags of rows [n]; a row may appear several times."""
        return self._flags[slots]


def draw_rows(weight: Tensor, rows: Tensor, seed: int) -> None:
    """Draw `weight` [n, d], the rows numbered `rows` [n] of a table, from N(0, 0.02²).

    A value depends on (seed, row number, column) alone. So every sharding of a table has the same values, and rows
    appended to it leave the others as they are. Blocks stay in the cache, and no second copy of the table is made.
    """
    with torch.no_grad():
        for block, numbers in zip(weight.split(_ROWS_AT_ONCE), rows.cpu().split(_ROWS_AT_ONCE), strict=True):
            levels = random_integers(numbers, seed, weight.shape[1], _LEVELS)
            # The middles of 2**24 equal steps of (-1, 1), exact in fp32; the normals of -1 and 1 would be infinite.
            uniform = levels.to(torch.float32).mul_(2.0 / _LEVELS).add_(1.0 / _LEVELS - 1.0)
            block.copy_(uniform.erfinv_().mul_(_STD * 2.0**0.5))
