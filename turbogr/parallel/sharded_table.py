"""The item table over many ranks: row-sharded over the members of a group, replicated over the groups.

A step goes through stages, each a method with explicit inputs and outputs, so that a pipeline may run them early or
elsewhere. Inside the group: `ask` and `hear` (distinct ids to their owners), `answer` (look-up and vectors on their
way), `receive` (the vectors), and after the backward `send_back` (gradients to the owners). Then `collect` sums: the
members' gradients of a row first, in the order of the members, then the groups' as (slot, gradient) pairs of the
touched rows, in the order of the groups. Each sum is made by one rank and handed to the others, so all copies of a row
take the same update, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from turbogr.layers.item_table import ItemTable, Request, RowGradients, Touched, WorkingSet, draw_rows, gradient_of
from turbogr.ops import prefer_huge_pages, unique_rows
from turbogr.parallel import wire
from turbogr.parallel.exchange import start_exchange
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.placement import Placement
from turbogr.parallel.world import contact


@dataclass(frozen=True)
class Question:
    """Distinct rows by owner, on their way to them: their `slots` there, `asked` [I] of each member; `coming` [I] is
    how many each will ask of this rank."""

    ids: Tensor
    index: Tensor
    slots: Tensor
    asked: Tensor
    coming: Tensor
    work: Any


@dataclass(frozen=True)
class Reply:
    """Vectors that are on their way."""

    message: Tensor
    sent: Tensor
    work: Any


@dataclass(frozen=True)
class ShardedWorkingSet(WorkingSet):
    """A working set that knows where its gradients go."""

    request: Request


@dataclass(frozen=True)
class Returned:
    """Gradients on their way to the owners of their rows."""

    request: Request
    message: Tensor
    sent: Tensor
    work: Any


class ShardedTable:
    """`weight` [shard rows, dim] is this rank's part of a table of `num_items` rows; all methods but `owned` are
    collective: every rank calls them in the same order, also one without work, with no ids.
    """

    def __init__(
        self,
        num_items: int,
        dim: int,
        mesh: Mesh,
        *,
        device: torch.device | str = "cpu",
        precision: wire.Precision = "fp32",
    ) -> None:
        self.mesh, self.precision = mesh, precision
        self.placement = Placement(num_items, mesh.members)
        self.weight = torch.empty(self.placement.shard_size(mesh.member), dim, device=device)
        prefer_huge_pages(self.weight)

    @property
    def num_items(self) -> int:
        return self.placement.num_rows

    @property
    def dim(self) -> int:
        return self.weight.shape[1]

    def owned(self) -> Tensor:
        """Return the rows whose slots 0, 1, ... this rank holds."""
        return self.placement.rows_of(self.mesh.member, self.weight.device)

    def reset_parameters(self, seed: int) -> None:
        """Draw all rows anew; a row's value does not depend on the mesh."""
        draw_rows(self.weight, self.owned(), seed)

    def assign_first(self, values: Tensor) -> None:
        """Set rows 0 to n - 1 to `values` [n, dim]."""
        owned = self.owned()
        known = owned < values.shape[0]
        self.weight[known] = values.to(self.weight.device)[owned[known]]

    def fetch(self, ids: Tensor | Sequence[Tensor]) -> ShardedWorkingSet:
        """Return the working set of `ids`, as `ItemTable.fetch`; `ids` of it come in the order of their owners.

        Raises:
            ValueError: an id outside the table.
        """
        request = self.hear(self.ask(ids))
        return self.working_set(request, self.receive(self.answer(request)))

    def ask(self, ids: Tensor | Sequence[Tensor]) -> Question:
        """Find the distinct rows and begin to tell their owners how many there are."""
        distinct, index = unique_rows(ids, self.num_items)
        if self.mesh.members == 1:
            count = torch.tensor([distinct.numel()])
            return Question(distinct, index, distinct, count, count, None)
        places, order = self.placement.places(distinct).sort()
        bounds = self.placement.bounds(places.device)
        asked = torch.searchsorted(places, bounds).diff()
        slots = places - bounds[:-1].repeat_interleave(asked)
        coming = torch.empty_like(asked)
        with contact("sparse"):
            work = dist.all_to_all_single(coming, asked, group=self.mesh.member_ranks, async_op=True)
        return Question(distinct[order], _moved(index, order), slots, asked, coming, work)

    def hear(self, question: Question) -> Request:
        """Wait for the counts, then tell the owners the rows."""
        if question.work is not None:
            with contact("sparse"):
                question.work.wait()
        asked, wanted = torch.stack([question.asked, question.coming]).tolist()
        slots = question.slots if question.work is None else self._exchange(question.slots, asked, wanted)
        return Request(question.ids, question.index, slots, asked, wanted)

    def answer(self, request: Request, weight: Tensor | None = None) -> Reply:
        """Look the wanted rows up, as they are now or in `weight`, and send them."""
        found = (self.weight if weight is None else weight).index_select(0, request.slots)
        if self.mesh.members == 1:
            return Reply(found, found, None)
        sent = wire.encode(found, self.precision)
        message = wire.message_like(request.ids.numel(), self.dim, self.precision, self.weight.device)
        work = self._start(message, sent, request.asked, request.wanted)
        return Reply(message, sent, work)

    def receive(self, reply: Reply) -> Tensor:
        """Wait for the vectors [R, d]."""
        return self._finish(reply)

    def working_set(self, request: Request, rows: Tensor) -> ShardedWorkingSet:
        """Make the rows of a request a leaf."""
        return ShardedWorkingSet(request.ids, request.index, rows.requires_grad_(), request)

    def row_gradients(self, working_set: WorkingSet) -> RowGradients:
        """Return the summed gradients of the rows of this rank's shard that any rank's batch touched."""
        assert isinstance(working_set, ShardedWorkingSet)
        return self.collect(self.send_back(working_set.request, gradient_of(working_set.rows)))

    def send_back(self, request: Request, grad: Tensor) -> Returned:
        """Send the gradients [R, d] of the rows to their owners."""
        if self.mesh.members == 1:
            return Returned(request, grad, grad, None)
        sent = wire.encode(grad, self.precision)
        message = wire.message_like(request.slots.numel(), self.dim, self.precision, self.weight.device)
        work = self._start(message, sent, request.wanted, request.asked)
        return Returned(request, message, sent, work)

    def collect(self, returned: Returned) -> RowGradients:
        """Sum the gradients of every touched row over the members and then over the groups."""
        grad, request = self._finish(returned), returned.request
        groups = self.mesh.groups
        if self.mesh.members == groups == 1:
            return RowGradients(request.slots, grad)
        slots, index = unique_rows(request.slots, self.weight.shape[0])
        if groups == 1:
            return RowGradients(slots, sum_blocks(grad, index, request.wanted, slots.numel()))
        # A slot is summed over the groups by replica slot % M: every replica has as much to do.
        part, order = (slots % groups).sort(stable=True)
        total = sum_blocks(grad, _moved(index, order), request.wanted, slots.numel())
        counts = part.bincount(minlength=groups)
        return self._sum_over_groups(slots[order], total, counts)

    def _sum_over_groups(self, slots: Tensor, grad: Tensor, counts: Tensor) -> RowGradients:
        """Sum (slot, gradient) pairs, sorted by slot % M with `counts` [M] each, over the groups."""
        ranks, groups = self.mesh.replica_ranks, self.mesh.groups
        coming = _all_to_all(counts, None, None, ranks)
        going_counts, coming_counts = torch.stack([counts, coming]).tolist()
        slots = _all_to_all(slots, going_counts, coming_counts, ranks)
        message = _all_to_all(wire.encode(grad, self.precision), going_counts, coming_counts, ranks)
        part, index = unique_rows(slots, self.weight.shape[0])
        total = wire.encode(
            sum_blocks(wire.decode(message, self.precision), index, coming_counts, part.numel()), self.precision
        )
        sizes = _gather_equal(part.new_tensor([part.numel()]), groups, ranks).flatten().tolist()
        room = max(sizes)
        parts = _gather_equal(_padded(part, room), groups, ranks)
        totals = _gather_equal(_padded(total, room), groups, ranks)
        kept = [(parts[group, :size], totals[group, :size]) for group, size in enumerate(sizes)]
        return RowGradients(
            torch.cat([slots for slots, _ in kept]), wire.decode(torch.cat([grad for _, grad in kept]), self.precision)
        )

    def touched(self, request: Request, first: Tensor | None = None) -> Touched:
        """Return the rows of the shard that any rank's request has, first those that are `first` [R] in some."""
        if first is not None and self.mesh.members > 1:
            first = self._exchange(first.to(torch.uint8), request.asked, request.wanted)
        slots, ranks = self._ranked(request.slots, first)
        if self.mesh.groups == 1:
            return Touched(slots, ranks)
        mine = 2 * slots + (ranks == 2)
        sizes = _gather_equal(mine.new_tensor([mine.numel()]), self.mesh.groups, self.mesh.replica_ranks)
        counts = sizes.flatten().tolist()
        parts = _gather_equal(_padded(mine, max(counts)), self.mesh.groups, self.mesh.replica_ranks)
        everyone = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return self._ranked(everyone // 2, everyone % 2)

    def _ranked(self, slots: Tensor, first: Tensor | None) -> Touched:
        """Return the distinct ones of the slots [Q], and which of them are `first` [Q] somewhere."""
        distinct, index = unique_rows(slots, self.weight.shape[0])
        ranks = torch.ones(distinct.shape, dtype=torch.uint8, device=distinct.device)
        if first is not None:
            ranks[index[first.to(torch.bool)]] = 2
        return Touched(distinct, ranks)

    def tell(self, request: Request, marks: Tensor) -> Tensor:
        """Send a mark (uint8) for each of the `slots` [Q] to whoever asked for them; return those of the `ids` [R]."""
        return marks if self.mesh.members == 1 else self._exchange(marks, request.wanted, request.asked)

    def part(self, request: Request, mine: Tensor, theirs: Tensor) -> Request:
        """Return the request for those rows alone that `mine` [R] and, at their owners, `theirs` [Q] flag."""
        counts = [
            [int(block.sum()) for block in flags.split(sizes)]
            for flags, sizes in ((mine, request.asked), (theirs, request.wanted))
        ]
        return Request(request.ids[mine], request.index, request.slots[theirs], *counts)

    def over(self, mesh: Mesh) -> ShardedTable:
        """Return this very table, talking over another channel of its mesh."""
        table = copy.copy(self)
        table.mesh = mesh
        return table

    def gathered(self) -> ItemTable:
        """Return a whole copy of the table on every rank."""
        whole = ItemTable(0, self.dim)
        whole.weight = self._whole(self.weight)
        return whole

    def _whole(self, local: Tensor) -> Tensor:
        if self.mesh.members == 1:
            return local
        mine = self._to_natural(local)
        bounds = self.placement.natural_bounds()
        parts = _gather_equal(_padded(mine, bounds[1]), self.mesh.members, self.mesh.member_ranks)
        return parts.flatten(0, 1)[: self.num_items]

    def for_checkpoint(self, local: Tensor) -> Tensor:
        """Return a tensor [shard rows, ...] as the rows of a global tensor in their natural order, which DCP saves from
        and loads into on any number of ranks."""
        assert self.mesh.devices is not None
        mine = self._to_natural(local)
        return DTensor.from_local(
            mine,
            self.mesh.devices,
            [Replicate(), Shard(0)],
            run_check=False,
            shape=torch.Size([self.num_items, *local.shape[1:]]),
            stride=local.stride(),
        )

    def from_checkpoint(self, natural: Tensor, local: Tensor) -> None:
        """Copy what `for_checkpoint` made of `local`, and DCP loaded into, back to it."""
        assert isinstance(natural, DTensor)
        local.copy_(self._from_natural(natural.to_local()))

    def _natural_plan(self) -> tuple[Tensor, list[int], Tensor, list[int]]:
        """How slots and natural rows change places: the slots of this shard in the order of their rows and how many go
        to each member; the rows of this rank's natural range in the order of their owners and how many come of each."""
        bounds = self.placement.natural_bounds()
        rows, by_row = self.owned().sort()
        cuts = torch.searchsorted(rows, torch.tensor(bounds, device=rows.device))
        first, last = bounds[self.mesh.member], bounds[self.mesh.member + 1]
        owners = self.placement.owners(torch.arange(first, last, device=rows.device))
        by_owner = owners.sort(stable=True).indices
        coming = owners.bincount(minlength=self.mesh.members)
        return by_row, cuts.diff().tolist(), by_owner, coming.tolist()

    def _to_natural(self, local: Tensor) -> Tensor:
        if self.mesh.members == 1:
            return local
        by_row, going, by_owner, coming = self._natural_plan()
        received = self._exchange(local[by_row], going, coming)
        natural = torch.empty_like(received)
        natural[by_owner] = received
        return natural

    def _from_natural(self, natural: Tensor) -> Tensor:
        if self.mesh.members == 1:
            return natural
        by_row, going, by_owner, coming = self._natural_plan()
        received = self._exchange(natural[by_owner], coming, going)
        local = torch.empty_like(received)
        local[by_row] = received
        return local

    def _exchange(self, send: Tensor, going: list[int] | None, coming: list[int] | None) -> Tensor:
        return _all_to_all(send, going, coming, self.mesh.member_ranks)

    def _start(self, message: Tensor, sent: Tensor, coming: list[int], going: list[int]) -> Any:
        with contact("sparse"):
            return start_exchange(message, sent, coming, going, self.mesh.member_ranks)

    def _finish(self, under_way: Reply | Returned) -> Tensor:
        if under_way.work is None:
            return under_way.message
        with contact("sparse"):
            under_way.work.wait()
        return wire.decode(under_way.message, self.precision)


def sum_blocks(values: Tensor, index: Tensor, sizes: list[int], num_rows: int) -> Tensor:
    """Return [num_rows, d] with row r the sum of the values [n, d] whose index [n] is r, block by block.

    `sizes` cuts the values into blocks, in which no index comes twice; the order of the sum is that of the blocks, on
    every device.
    """
    total = values.new_zeros(num_rows, values.shape[1])
    for block, places in zip(values.split(sizes), index.split(sizes), strict=True):
        total.index_add_(0, places, block)
    return total


def _moved(index: Tensor, order: Tensor) -> Tensor:
    """Return `index` [n] into what x[order] has become, where it was an index into x; int32 as `unique_rows` has it."""
    places = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    places[order] = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return places.index_select(0, index)


def _all_to_all(send: Tensor, going: list[int] | None, coming: list[int] | None, ranks: Any) -> Tensor:
    """Send the blocks of `send` [n, ...] to the ranks of a process group and return what they sent, by rank."""
    if coming is None or going is None:
        coming = going = [send.shape[0] // dist.get_world_size(ranks)] * dist.get_world_size(ranks)
    received = send.new_empty(sum(coming), *send.shape[1:])
    with contact("sparse"):
        start_exchange(received, send.contiguous(), coming, going, ranks).wait()
    return received


def _gather_equal(values: Tensor, size: int, ranks: Any) -> Tensor:
    """Return the values [n, ...] of every rank of a process group, [size, n, ...]."""
    everyone = values.new_empty(size, *values.shape)
    with contact("sparse"):
        dist.all_gather(list(everyone.unbind()), values.contiguous(), group=ranks)
    return everyone


def _padded(values: Tensor, room: int) -> Tensor:
    """Return `values` [n, ...] with whatever rows behind them, [room, ...]."""
    if values.shape[0] == room:
        return values
    larger = values.new_zeros(room, *values.shape[1:])
    larger[: values.shape[0]] = values
    return larger
