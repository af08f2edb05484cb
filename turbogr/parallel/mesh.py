"""The mesh of ranks, M groups × I members, and how its size is chosen.

Every group holds one whole item table, sharded over its members. Consecutive ranks form a group, so with I ranks per
machine the exchange of rows stays inside a machine. M = 1 is plain model parallelism, I = 1 a replicated table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from turbogr.errors import UserError
from turbogr.parallel.sockets import open_sockets, shut_down
from turbogr.parallel.world import Ranks, World, communicating, mark_aborting, new_group, while_connected

_TABLE_SHARE = 0.5


class MeshSize(NamedTuple):
    """M groups × I members, and the reason for this choice."""

    groups: int
    members: int
    reason: str


def choose_mesh(
    size: int,
    local_size: int,
    *,
    groups: int | None = None,
    members: int | None = None,
    table_bytes: int = 0,
    rank_memory: int = 0,
) -> MeshSize:
    """Choose the mesh of `size` ranks, `local_size` of them on each machine.

    `groups` and `members` are the config's values; None is chosen here: a group is the ranks of one machine, or of as
    few machines as can hold a table of `table_bytes` (weights and optimiser state) in half of the memory of their
    ranks, `rank_memory` bytes each (0: unknown).

    Raises:
        UserError: `groups` or `members` does not fit the number of ranks.
    """
    for name, number in (("groups", groups), ("members", members)):
        if number is not None and size % number:
            raise UserError(
                f"parallel.{name} is {number}, which does not divide {size} ranks; choose from {_divisors(size)}"
            )
    if groups is not None and members is not None and groups * members != size:
        raise UserError(
            f"parallel.groups {groups} × parallel.members {members} is {groups * members}, but there are {size} ranks; "
            "set one of them and leave the other out"
        )
    if groups is not None or members is not None:
        members = members if members is not None else size // (groups or 1)
        return MeshSize(size // members, members, "set in the config")
    if size % local_size:
        return MeshSize(1, size, f"{size} ranks do not divide into machines of {local_size}, so all share one table")
    if size == local_size:
        return MeshSize(1, size, "one machine: its ranks share one item table")

    def fits(machines: int) -> bool:
        return not rank_memory or table_bytes <= _TABLE_SHARE * rank_memory * machines * local_size

    num_machines = size // local_size
    machines = next(filter(fits, _divisors(num_machines)), num_machines)
    where = "each machine" if machines == 1 else f"{machines} machines"
    need = "" if not rank_memory else f"; it takes {table_bytes / 2**30:.1f} GiB with its optimiser's state"
    return MeshSize(num_machines // machines, machines * local_size, f"the ranks of {where} share one item table{need}")


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@dataclass(frozen=True)
class Mesh:
    """The mesh as seen by this rank: member `member` of group `group`; rank = group · members + member.

    `member_ranks`: process group of the members of this group. `replica_ranks`: process group of the ranks that hold
    the same shard, one in every group. `own_ranks`: these two process groups if they are not those of `devices`.
    `sockets`: their connections.
    """

    world: World
    groups: int = 1
    members: int = 1
    device_mesh: Callable[[], DeviceMesh] | None = None
    own_ranks: tuple[Ranks, Ranks] | None = None
    sockets: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def build(cls, world: World, size: MeshSize, device_type: str) -> Mesh:
        """Create the process groups; all ranks call it together."""
        assert size.groups * size.members == world.size, (size, world)
        if world.size == 1:
            return cls(world)
        with communicating():
            devices = init_device_mesh(device_type, (size.groups, size.members), mesh_dim_names=("group", "member"))
        return cls(world, size.groups, size.members, while_connected(devices))

    def channel(self) -> Mesh:
        """Return this mesh with process groups of its own; all ranks call it together.

        Ranks must start the messages of a process group in the same order. So a thread that communicates while others
        do needs process groups that only it uses.
        """
        if self.world.size == 1:
            return self
        ranks = [list(range(first, first + self.members)) for first in range(0, self.world.size, self.members)]
        before = open_sockets()
        with communicating():
            member_ranks = _own_group(ranks, self.world.rank)
            replica_ranks = _own_group([list(replicas) for replicas in zip(*ranks, strict=True)], self.world.rank)
        opened = dict(open_sockets().items() - before.items())
        return replace(self, own_ranks=(member_ranks, replica_ranks), sockets=opened)

    def abort(self) -> None:
        """Make all waits on this mesh's own process groups fail now, on all ranks; this process must end."""
        mark_aborting()
        for ranks in self.own_ranks or ():
            with suppress(RuntimeError):  # the ranks are disconnected
                ranks().abort()  # enough for the backends of accelerators; gloo ignores it
        shut_down(self.sockets)

    @property
    def devices(self) -> DeviceMesh:
        """The mesh as torch knows it; there is none for a single rank."""
        assert self.device_mesh is not None
        return self.device_mesh()

    @property
    def group(self) -> int:
        return self.world.rank // self.members

    @property
    def member(self) -> int:
        return self.world.rank % self.members

    @property
    def member_ranks(self) -> Any:
        if self.own_ranks is not None:
            return self.own_ranks[0]()
        return self.devices.get_group("member")

    @property
    def replica_ranks(self) -> Any:
        if self.own_ranks is not None:
            return self.own_ranks[1]()
        return self.devices.get_group("group")

    def __str__(self) -> str:
        return f"{self.groups} × {self.members}"


def _own_group(partition: list[list[int]], rank: int) -> Ranks:
    """Create a process group for every part of the ranks and return the one that contains `rank`."""

    made = [new_group(part) for part in partition]
    return next(group for part, group in zip(partition, made, strict=True) if rank in part)
