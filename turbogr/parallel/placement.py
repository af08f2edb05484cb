"""Which member of a group holds which rows of the item table: pure arithmetic, the same on every rank.

Neighbouring rows often have neighbouring popularity (ids in order of first sight, or sorted by count), so a member that
held a contiguous range would be hot. Rows are scattered by a multiplicative hash that is a bijection,
place = row · a mod num_rows with a prime to num_rows and near the golden ratio of it, and a member holds a contiguous
range of places. Shards differ by at most one row, and both directions are computed, not stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class Placement:
    """Rows 0 to num_rows - 1 over `num_members` members; with a single member a row's slot is the row itself."""

    num_rows: int
    num_members: int

    def __post_init__(self) -> None:
        assert 0 < self.num_rows < 2**31 and self.num_members > 0, (self.num_rows, self.num_members)

    @property
    def multiplier(self) -> int:
        if self.num_members == 1:
            return 1
        wanted = max(1, round(_GOLDEN * self.num_rows))
        while math.gcd(wanted, self.num_rows) != 1:
            wanted += 1
        return wanted

    def bounds(self, device: torch.device | str = "cpu") -> Tensor:
        """First place of every member and the end, [num_members + 1] int64."""
        members = torch.arange(self.num_members + 1, dtype=torch.int64, device=device)
        return (members * self.num_rows) // self.num_members

    def shard_size(self, member: int) -> int:
        """Number of rows that a member holds."""
        return (member + 1) * self.num_rows // self.num_members - member * self.num_rows // self.num_members

    def places(self, rows: Tensor) -> Tensor:
        """Return the place of every row [n] int64; places of one member are contiguous, see `bounds`."""
        return rows if self.num_members == 1 else rows * self.multiplier % self.num_rows

    def rows_of(self, member: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the rows that a member holds, in the order of its slots, [shard_size] int64."""
        first = member * self.num_rows // self.num_members
        places = torch.arange(first, first + self.shard_size(member), dtype=torch.int64, device=device)
        if self.num_members == 1:
            return places
        return places * pow(self.multiplier, -1, self.num_rows) % self.num_rows

    def owners(self, rows: Tensor) -> Tensor:
        """Return the member that holds every row [n] int64."""
        return torch.bucketize(self.places(rows), self.bounds(rows.device)[1:], right=True)

    def natural_bounds(self) -> list[int]:
        """Rows of member j in a checkpoint are bounds[j] to bounds[j + 1] - 1, as DTensor's Shard(0) cuts them."""
        chunk = -(-self.num_rows // self.num_members)
        return [min(member * chunk, self.num_rows) for member in range(self.num_members + 1)]
