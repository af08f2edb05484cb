"""The item table of one process: which rows a batch needs, and their vectors as one leaf tensor.

A sharded table (`turbogr/parallel/sharded_table.py`) offers the same, so nothing above can tell where rows live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from turbogr.ops import prefer_huge_pages, random_integers, unique_rows

_ROWS_AT_ONCE = 4096
_STD = 0.02
_LEVELS = 2**24


@dataclass(frozen=True)
class WorkingSet:
    """The distinct rows that a batch needs.

    `ids` [R]; `index` [n] int32 places each requested id in `ids`; `rows` [R, d] is a leaf whose gradient is the sum
    over all uses of each row. Rows that no input of the batch uses may be there only after `late`, if that is given,
    and `early` gets the gradient [R, d] of the loss as soon as the backward has it, complete for just those rows.
    """

    ids: Tensor
    index: Tensor
    rows: Tensor
    late: Callable[[], object] | None = field(default=None, kw_only=True)
    early: Callable[[Tensor], None] | None = field(default=None, kw_only=True)

    def for_inputs(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows on a device and the places in them of the first `count` requested ids."""
        return on_device(self.rows, self.index[:count], device)

    def for_loss(self) -> Tensor:
        """Return `rows` when all of them are there; what the loss uses must be this."""
        if self.late is not None:
            self.late()
        if self.early is None:
            return self.rows
        rows = self.rows.view_as(self.rows)
        rows.register_hook(self.early)  # type: ignore[no-untyped-call]
        return rows


@dataclass(frozen=True)
class Request:
    """Which distinct rows a batch needs, `ids` [R] by owner and `index` [n] as in WorkingSet.

    `slots` [Q] are the rows of this process's `weight` that are asked for, by who asks. This process asks each owner
    for `asked` rows and is asked for `wanted` by each; alone it is the only one.
    """

    ids: Tensor
    index: Tensor
    slots: Tensor
    asked: list[int]
    wanted: list[int]


class RowGradients(NamedTuple):
    """Gradients [R, d] of the distinct rows of `weight` that `slots` [R] names."""

    slots: Tensor
    grad: Tensor


class Touched(NamedTuple):
    """Distinct rows of `weight` that `slots` [n] names, and their ranks [n] uint8: 2 if first in some way, else 1."""

    slots: Tensor
    ranks: Tensor


class Table(Protocol):
    """What training needs of an item table; `weight` holds the rows of this process."""

    weight: Tensor

    @property
    def num_items(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def reset_parameters(self, seed: int) -> None:
        """Draw all rows anew, as a function of (seed, row)."""
        ...

    def assign_first(self, values: Tensor) -> None:
        """Set rows 0 to n - 1 to `values` [n, dim]."""
        ...

    def fetch(self, ids: Tensor | Sequence[Tensor]) -> WorkingSet:
        """Return the working set of `ids`, int64 or int32, one tensor or several, duplicates allowed."""
        ...

    def row_gradients(self, working_set: WorkingSet) -> RowGradients:
        """Return the gradients by which the rows of `weight` are to be updated."""
        ...

    def gathered(self) -> ItemTable:
        """Return the whole table."""
        ...

    # The same in stages, for a pipeline. Messages are in the order of the calls, so ranks must make the same ones.

    def ask(self, ids: Tensor | Sequence[Tensor]) -> Any:
        """Find the distinct rows of `ids` and begin to tell their owners."""
        ...

    def hear(self, question: Any) -> Request:
        """Wait until every owner knows."""
        ...

    def answer(self, request: Request, weight: Tensor | None = None) -> Any:
        """Look the rows up as they are now, or in `weight`, and send them to whoever asked."""
        ...

    def receive(self, reply: Any) -> Tensor:
        """Wait for the rows [R, d]."""
        ...

    def working_set(self, request: Request, rows: Tensor) -> WorkingSet:
        """Make the rows of a request a leaf."""
        ...

    def send_back(self, request: Request, grad: Tensor) -> Any:
        """Send gradients [R, d] to the owners of the rows."""
        ...

    def collect(self, returned: Any) -> RowGradients:
        """Sum the gradients of every row of `weight` that any rank's request has."""
        ...

    def touched(self, request: Request, first: Tensor | None = None) -> Touched:
        """Return the rows of `weight` that any rank's request has, first those that are `first` [R] bool in some."""
        ...

    def tell(self, request: Request, marks: Tensor) -> Tensor:
        """Turn a mark for each of the `slots` [Q] into one for each of the `ids` [R] of whoever asked."""
        ...

    def part(self, request: Request, mine: Tensor, theirs: Tensor) -> Request:
        """Return the request for those rows alone that `mine` [R] flags, and the owners' `theirs` [Q]; `index` stays
        that of the whole."""
        ...


class ItemTable:
    """`weight` [num_items, dim], drawn from a normal distribution of standard deviation 0.02."""

    def __init__(self, num_items: int, dim: int, *, device: torch.device | str = "cpu") -> None:
        self.weight = torch.empty(num_items, dim, device=device)
        prefer_huge_pages(self.weight)

    @property
    def num_items(self) -> int:
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        return self.weight.shape[1]

    def reset_parameters(self, seed: int) -> None:
        """Draw all rows anew, as a function of (seed, row)."""
        draw_rows(self.weight, torch.arange(self.num_items), seed)

    def assign_first(self, values: Tensor) -> None:
        """Set rows 0 to n - 1 to `values` [n, dim]."""
        self.weight[: values.shape[0]].copy_(values)

    def fetch(self, ids: Tensor | Sequence[Tensor]) -> WorkingSet:
        """Return the working set of `ids`, int64 or int32, one tensor or several, duplicates allowed; its `ids` rise.

        Raises:
            ValueError: an id outside the table.
        """
        request = self.ask(ids)
        return self.working_set(request, self.answer(request))

    def row_gradients(self, working_set: WorkingSet) -> RowGradients:
        """Return the gradients that the backward left, without a copy."""
        assert working_set.rows.grad is not None, "no backward has been run"
        return RowGradients(working_set.ids, working_set.rows.grad)

    def gathered(self) -> ItemTable:
        return self

    def ask(self, ids: Tensor | Sequence[Tensor]) -> Request:
        distinct, index = unique_rows(ids, self.num_items)
        count = [distinct.numel()]
        return Request(distinct, index, distinct, count, count)

    def hear(self, question: Request) -> Request:
        return question

    def answer(self, request: Request, weight: Tensor | None = None) -> Tensor:
        return (self.weight if weight is None else weight).index_select(0, request.slots)

    def receive(self, reply: Tensor) -> Tensor:
        return reply

    def working_set(self, request: Request, rows: Tensor) -> WorkingSet:
        return WorkingSet(request.ids, request.index, rows.requires_grad_())

    def send_back(self, request: Request, grad: Tensor) -> RowGradients:
        return RowGradients(request.slots, grad)

    def collect(self, returned: RowGradients) -> RowGradients:
        return returned

    def touched(self, request: Request, first: Tensor | None = None) -> Touched:
        ranks = torch.ones(request.slots.shape, dtype=torch.uint8, device=request.slots.device)
        return Touched(request.slots, ranks if first is None else ranks + first.to(torch.uint8))

    def tell(self, request: Request, marks: Tensor) -> Tensor:
        return marks

    def part(self, request: Request, mine: Tensor, theirs: Tensor) -> Request:
        chosen = request.ids[mine]
        count = [chosen.numel()]
        return Request(chosen, request.index, chosen, count, count)


def on_device(rows: Tensor, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and places `index` [n] in them on a device; where rows are elsewhere, a copy of those alone that are
    used."""
    if rows.device == device:
        return rows, index.to(device)
    used, places = unique_rows(index.to(rows.device).contiguous(), rows.shape[0])
    return rows.index_select(0, used).to(device), places.to(device)


def gradient_of(rows: Tensor) -> Tensor:
    """Return the gradient of `rows`, zeros where no token has used them."""
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


def marked(weight: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Return a bool for every row of `weight`, true for those in `slots`."""
    marks = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
    for some in slots:
        marks[some] = True
    return marks


class Marks:
    """A byte for every row of a table, 0 but for the rows of one batch.

    A batch reads few rows of a large table, so nothing here but making it goes through all of them.
    """

    def __init__(self, weight: Tensor) -> None:
        self._marks = torch.zeros(weight.shape[0], dtype=torch.uint8, device=weight.device)
        self._slots = torch.empty(0, dtype=torch.int64, device=weight.device)

    def set(self, slots: Tensor, marks: Tensor) -> None:
        """Mark the rows `slots` [n], which are distinct, with `marks` [n], and no others."""
        self._marks[self._slots] = 0
        self._marks[slots] = marks
        self._slots = slots

    def of(self, slots: Tensor) -> Tensor:
        """Return the marks of rows [n], which may come several times."""
        return self._marks[slots]


def draw_rows(weight: Tensor, rows: Tensor, seed: int) -> None:
    """Draw `weight` [n, d], the rows `rows` [n] of a table, from N(0, 0.02²).

    A value depends on (seed, row, column) alone, so every sharding of a table has the same values, and rows appended to
    it leave the others as they are. Small blocks stay in the cache, and a large table needs no second copy of itself.
    """
    with torch.no_grad():
        for block, names in zip(weight.split(_ROWS_AT_ONCE), rows.cpu().split(_ROWS_AT_ONCE), strict=True):
            levels = random_integers(names, seed, weight.shape[1], _LEVELS)
            # The middles of 2**24 equal steps of (-1, 1), exact in fp32; the normals of -1 and 1 would be infinite.
            uniform = levels.to(torch.float32).mul_(2.0 / _LEVELS).add_(1.0 / _LEVELS - 1.0)
            block.copy_(uniform.erfinv_().mul_(_STD * 2.0**0.5))
