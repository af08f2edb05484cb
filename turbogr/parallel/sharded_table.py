"""A table over many ranks: row-sharded over the members of a group of ranks, replicated over the groups.

The stages of `turbogr.tables.table.Table`, over the network. Inside a group of ranks: `send_ids` and `receive_ids`
(distinct ids to their owners), `send_rows` and `receive_rows` (look-up, vectors to the ranks that asked), and after
the backward pass `send_gradients`. `sum_gradients` then sums each row's gradients: first over the members, in their
order, then over the groups as (slot, gradient) pairs of the rows used, in the order of the groups. Each sum is made by
one rank and sent to the others, so all copies of a row take the same update, bit for bit.
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

from turbogr.ops import prefer_huge_pages, unique_rows
from turbogr.parallel import row_encoding
from turbogr.parallel.collective_issuer import issue
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.row_exchange import start_exchange
from turbogr.parallel.row_sharding import RowSharding
from turbogr.parallel.world import communicating
from turbogr.streams import upload
from turbogr.tables.table import IdRange, RowGradients, RowRequest, UsedRows, draw_rows


@dataclass(frozen=True)
class PendingIds:
    """Distinct ids, sorted by owner, whose counts are being sent.

    `slots` are their rows at the owners, `num_requested` [I] how many each member owns; `num_owned` [I] will hold how
    many each member asks of this rank.
    """

    ids: Tensor
    index: Tensor
    slots: Tensor
    num_requested: Tensor
    num_owned: Tensor
    work: Any


@dataclass(frozen=True)
class PendingRows:
    """Rows being sent; `sent` is kept until they have arrived."""

    message: Tensor
    sent: Tensor
    work: Any


@dataclass(frozen=True)
class PendingGradients:
    """Gradients being sent to the owners of their rows."""

    request: RowRequest
    message: Tensor
    sent: Tensor
    work: Any


class ShardedTable:
    """`weight` [shard rows, dim] is this rank's part of a table of `num_rows` rows.

    All methods but `owned` are collective: every rank calls them in the same order, also one that needs no rows.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        mesh: Mesh,
        *,
        device: torch.device | str = "cpu",
        precision: row_encoding.Precision = "fp32",
    ) -> None:
        self.mesh, self.precision = mesh, precision
        self.sharding = RowSharding(num_rows, mesh.members)
        self.weight = torch.empty(self.sharding.shard_size(mesh.member), dim, device=device)
        prefer_huge_pages(self.weight)

    @property
    def num_rows(self) -> int:
        return self.sharding.num_rows

    @property
    def dim(self) -> int:
        return self.weight.shape[1]

    def owned(self) -> Tensor:
        """Return the rows whose slots 0, 1, ... this rank holds, in host memory."""
        return self.sharding.rows_of(self.mesh.member, torch.device("cpu"))

    def draw(self, first: int, num_rows: int, seed: int) -> None:
        """Draw rows; a row's value does not depend on the mesh."""
        if num_rows == self.num_rows:
            draw_rows(self.weight, self.owned(), seed)
            return
        slots, rows = self.held_rows(first, num_rows)
        values = torch.empty(slots.numel(), self.dim)
        draw_rows(values, rows, seed)
        self.weight[slots.to(self.weight.device)] = values.to(self.weight.device)

    def assign(self, first: int, values: Tensor) -> None:
        """Set the rows from `first` on to `values` [n, dim]."""
        slots, rows = self.held_rows(first, values.shape[0])
        device = self.weight.device
        self.weight[slots.to(device)] = values.to(device)[rows.to(device)]

    def held_rows(self, first: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return this rank's slots of rows first, first + 1, ..., and which of them they are, counted from 0."""
        owned = self.owned()
        slots = ((owned >= first) & (owned < first + num_rows)).nonzero().flatten()
        return slots, owned[slots] - first

    def send_ids(self, ids: Sequence[Tensor], ranges: Sequence[IdRange] | None = None) -> PendingIds:
        """Find the distinct rows and start to send their owners how many there are."""
        distinct, index = unique_rows(ids, self.num_rows, ranges)
        if self.mesh.members == 1:
            count = torch.tensor([distinct.numel()])
            return PendingIds(distinct, index, distinct, count, count, None)
        places, order = self.sharding.shuffled(distinct).sort()
        bounds = self.sharding.bounds(places.device)
        num_requested = torch.searchsorted(places, bounds).diff()
        slots = places - bounds[:-1].repeat_interleave(num_requested)
        num_owned = torch.empty_like(num_requested)
        with communicating("sparse"):
            work = dist.all_to_all_single(num_owned, num_requested, group=self.mesh.member_ranks, async_op=True)
        return PendingIds(distinct[order], _reordered(index, order), slots, num_requested, num_owned, work)

    def receive_ids(self, pending: PendingIds) -> RowRequest:
        """Wait for the counts, then exchange the ids."""
        if pending.work is not None:
            with communicating("sparse"):
                pending.work.wait()
        num_requested, num_owned = torch.stack([pending.num_requested, pending.num_owned]).tolist()
        slots = pending.slots
        if pending.work is not None:
            slots = self._exchange(slots, num_requested, num_owned)
        return RowRequest(pending.ids, pending.index, slots, num_requested, num_owned).to(self.weight.device)

    def send_rows(self, request: RowRequest, weight: Tensor | None = None) -> PendingRows:
        """Look up the rows that others ask for, as they are now or in `weight`, and start to send them."""
        found = (self.weight if weight is None else weight).index_select(0, request.slots)
        if self.mesh.members == 1:
            return PendingRows(found, found, None)
        sent = row_encoding.encode(found, self.precision)
        message = row_encoding.empty_message(request.ids.numel(), self.dim, self.precision, self.weight.device)
        work = self._start(message, sent, request.num_requested, request.num_owned)
        return PendingRows(message, sent, work)

    def receive_rows(self, pending: PendingRows) -> Tensor:
        """Wait for the rows [R, d]."""
        return self._finish(pending)

    def send_gradients(self, request: RowRequest, grad: Tensor) -> PendingGradients:
        """Start to send the gradients [R, d] of the rows to their owners."""
        if self.mesh.members == 1:
            return PendingGradients(request, grad, grad, None)
        sent = row_encoding.encode(grad, self.precision)
        message = row_encoding.empty_message(request.slots.numel(), self.dim, self.precision, self.weight.device)
        work = self._start(message, sent, request.num_owned, request.num_requested)
        return PendingGradients(request, message, sent, work)

    def sum_gradients(self, pending: PendingGradients) -> RowGradients:
        """Sum the gradients of every row used over the members, then over the groups."""
        grad, request, device = self._finish(pending), pending.request, self.weight.device
        groups = self.mesh.groups
        if self.mesh.members == groups == 1:
            return RowGradients(request.slots, grad)
        owned = request.at_hand.slots
        slots, index = unique_rows(owned, self.weight.shape[0])
        if groups == 1:
            total = sum_blocks(grad, upload(index, device), request.num_owned, slots.numel())
            return RowGradients(upload(slots, device), total)
        # A slot is summed over the groups by replica slot % M, so every replica has as much to do.
        part, order = (slots % groups).sort(stable=True)
        total = sum_blocks(grad, upload(_reordered(index, order), device), request.num_owned, slots.numel())
        counts = part.bincount(minlength=groups)
        return self._sum_over_groups(slots[order], total, counts)

    def _sum_over_groups(self, slots: Tensor, grad: Tensor, counts: Tensor) -> RowGradients:
        """Sum (slot, gradient) pairs, sorted by slot % M with `counts` [M] each, over the groups.

        Slots and counts are in host memory, gradients on the device.
        """
        ranks, groups, device = self.mesh.replica_ranks, self.mesh.groups, grad.device
        coming = _all_to_all(counts, None, None, ranks)
        going_counts, coming_counts = torch.stack([counts, coming]).tolist()
        slots = _all_to_all(slots, going_counts, coming_counts, ranks)
        message = _all_to_all(row_encoding.encode(grad, self.precision), going_counts, coming_counts, ranks)
        part, index = unique_rows(slots, self.weight.shape[0])
        total = row_encoding.encode(
            sum_blocks(
                row_encoding.decode(message, self.precision), upload(index, device), coming_counts, part.numel()
            ),
            self.precision,
        )
        sizes = _gather_equal(part.new_tensor([part.numel()]), groups, ranks).flatten().tolist()
        room = max(sizes)
        parts = _gather_equal(_padded(part, room), groups, ranks)
        totals = _gather_equal(_padded(total, room), groups, ranks)
        return RowGradients(
            upload(torch.cat([parts[group, :size] for group, size in enumerate(sizes)]), device),
            row_encoding.decode(torch.cat([totals[group, :size] for group, size in enumerate(sizes)]), self.precision),
        )

    def used_rows(self, request: RowRequest, inputs: Tensor | None = None) -> UsedRows:
        """Return the rows of the shard that any rank's request has; `inputs` [R] bool marks inputs of the batch."""
        request = request.at_hand
        if inputs is not None and self.mesh.members > 1:
            inputs = self._exchange(inputs.to(torch.uint8), request.num_requested, request.num_owned)
        slots, uses = self._distinct_uses(request.slots, inputs)
        if self.mesh.groups == 1:
            return UsedRows(slots, uses)
        mine = 2 * slots + (uses == 2)
        sizes = _gather_equal(mine.new_tensor([mine.numel()]), self.mesh.groups, self.mesh.replica_ranks)
        counts = sizes.flatten().tolist()
        parts = _gather_equal(_padded(mine, max(counts)), self.mesh.groups, self.mesh.replica_ranks)
        everyone = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return self._distinct_uses(everyone // 2, everyone % 2)

    def _distinct_uses(self, slots: Tensor, inputs: Tensor | None) -> UsedRows:
        """Return the distinct slots of [Q], and which of them are `inputs` [Q] at least once."""
        distinct, index = unique_rows(slots, self.weight.shape[0])
        uses = torch.ones(distinct.shape, dtype=torch.uint8, device=distinct.device)
        if inputs is not None:
            uses[index[inputs.to(torch.bool)]] = 2
        return UsedRows(distinct, uses)

    def flags_for_requesters(self, request: RowRequest, flags: Tensor) -> Tensor:
        """Send a flag (uint8) for each of the `slots` [Q] to the rank that asked; return those of the `ids` [R]."""
        if self.mesh.members == 1:
            return flags
        return self._exchange(flags, request.num_owned, request.num_requested)

    def subset(self, request: RowRequest, requested: Tensor, owned: Tensor) -> RowRequest:
        """Return the request for those rows alone that `requested` [R] and, at their owners, `owned` [Q] mark."""
        num_requested, num_owned = (
            [int(block.sum()) for block in marks.split(sizes)]
            for marks, sizes in ((requested, request.num_requested), (owned, request.num_owned))
        )
        request = request.at_hand
        part = RowRequest(request.ids[requested], request.index, request.slots[owned], num_requested, num_owned)
        return part.to(self.weight.device)

    def over(self, mesh: Mesh) -> ShardedTable:
        """Return this very table, communicating over another channel of its mesh."""
        table = copy.copy(self)
        table.mesh = mesh
        return table

    def gather(self, first: int, num_rows: int) -> Tensor:
        """Return `num_rows` rows from row `first` on, whole, on every rank."""
        if self.mesh.members == 1:
            return self.weight[first : first + num_rows]
        mine = self._to_row_order(self.weight, first, num_rows)
        room = self._row_order_bounds(num_rows)[1]
        parts = _gather_equal(_padded(mine, room), self.mesh.members, self.mesh.member_ranks)
        return parts.flatten(0, 1)[:num_rows]

    def for_checkpoint(self, local: Tensor, first: int, num_rows: int) -> Tensor:
        """Return rows of a tensor [shard rows, ...] as a global tensor in the order of the table.

        DCP saves from it and loads into it on any number of ranks.
        """
        mine = self._to_row_order(local, first, num_rows)
        return DTensor.from_local(
            mine,
            self.mesh.devices,
            [Replicate(), Shard(0)],
            run_check=False,
            shape=torch.Size([num_rows, *local.shape[1:]]),
            stride=local.stride(),
        )

    def from_checkpoint(self, stored: Tensor, local: Tensor, first: int, num_rows: int) -> None:
        """Copy what DCP loaded into the result of `for_checkpoint` back into `local`."""
        assert isinstance(stored, DTensor)
        if self.mesh.members == 1:
            local[first : first + num_rows] = stored.to_local()
            return
        plan = self._row_order_plan(first, num_rows)
        local[plan.slots] = self._exchange(stored.to_local()[plan.by_owner], plan.coming, plan.going)

    def _to_row_order(self, local: Tensor, first: int, num_rows: int) -> Tensor:
        """Return this rank's part of rows in the order of the table."""
        if self.mesh.members == 1:
            return local[first : first + num_rows]
        plan = self._row_order_plan(first, num_rows)
        received = self._exchange(local[plan.slots], plan.going, plan.coming)
        ordered = torch.empty_like(received)
        ordered[plan.by_owner] = received
        return ordered

    def _row_order_bounds(self, num_rows: int) -> list[int]:
        return RowSharding(num_rows, self.mesh.members).row_order_bounds()

    def _row_order_plan(self, first: int, num_rows: int) -> _RowOrderPlan:
        bounds = self._row_order_bounds(num_rows)
        slots, rows = self.held_rows(first, num_rows)
        rows, by_row = rows.sort()
        cuts = torch.searchsorted(rows, torch.tensor(bounds))
        begin, end = bounds[self.mesh.member], bounds[self.mesh.member + 1]
        owners = self.sharding.owners(torch.arange(first + begin, first + end, device=rows.device))
        coming = owners.bincount(minlength=self.mesh.members)
        device, by_owner = self.weight.device, owners.sort(stable=True).indices
        return _RowOrderPlan(slots[by_row].to(device), cuts.diff().tolist(), by_owner.to(device), coming.tolist())

    def _exchange(self, send: Tensor, going: list[int] | None, coming: list[int] | None) -> Tensor:
        return _all_to_all(send, going, coming, self.mesh.member_ranks)

    def _start(self, message: Tensor, sent: Tensor, coming: list[int], going: list[int]) -> Any:
        with communicating("sparse"):
            return start_exchange(message, sent, coming, going, self.mesh.member_ranks)

    def _finish(self, pending: PendingRows | PendingGradients) -> Tensor:
        if pending.work is None:
            return pending.message
        with communicating("sparse"):
            pending.work.wait()
        return row_encoding.decode(pending.message, self.precision)


@dataclass(frozen=True)
class _RowOrderPlan:
    """How rows move between the shards and the order of a table.

    The `slots` of this shard in the order of their rows, and how many go to each member; the rows of this rank's part
    of the order, sorted by owner, and how many come from each.
    """

    slots: Tensor
    going: list[int]
    by_owner: Tensor
    coming: list[int]


def sum_blocks(values: Tensor, index: Tensor, sizes: list[int], num_rows: int) -> Tensor:
    """Return [num_rows, d] with row r the sum of the values [n, d] whose index [n] is r, block by block.

    `sizes` cuts the values into blocks, in which no index comes twice; the order of the sum is that of the blocks, on
    every device.
    """
    total = values.new_zeros(num_rows, values.shape[1])
    for block, places in zip(values.split(sizes), index.split(sizes), strict=True):
        total.index_add_(0, places, block)
    return total


def _reordered(index: Tensor, order: Tensor) -> Tensor:
    """Turn `index` [n] into x into the index of the same elements in x[order]; int32, as `unique_rows` returns it."""
    places = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    places[order] = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return places.index_select(0, index)


def _all_to_all(send: Tensor, going: list[int] | None, coming: list[int] | None, ranks: Any) -> Tensor:
    """Send the blocks of `send` [n, ...] to the ranks of a process group and return what they sent, by rank."""
    if coming is None or going is None:
        coming = going = [send.shape[0] // dist.get_world_size(ranks)] * dist.get_world_size(ranks)
    received = send.new_empty(sum(coming), *send.shape[1:])
    with communicating("sparse"):
        start_exchange(received, send.contiguous(), coming, going, ranks).wait()
    return received


def _gather_equal(values: Tensor, size: int, ranks: Any) -> Tensor:
    """Return the values [n, ...] of every rank of a process group, [size, n, ...]."""
    everyone = values.new_empty(size, *values.shape)
    with communicating("sparse"):
        sent = values.contiguous()
        issue(values.device, lambda: dist.all_gather(list(everyone.unbind()), sent, group=ranks))
    return everyone


def _padded(values: Tensor, room: int) -> Tensor:
    """Return `values` [n, ...] followed by rows of any content, [room, ...]."""
    if values.shape[0] == room:
        return values
    larger = values.new_zeros(room, *values.shape[1:])
    larger[: values.shape[0]] = values
    return larger
