"""Which member of a group holds which rows of the item table: computed from the row's number, the same on every rank.

Rows next to each other often have similar popularity (ids in order of first appearance, or sorted by count), so a
member with a contiguous range of rows could get most of the traffic. Therefore rows are shuffled by a bijective hash,
row · a mod num_rows, where a has no common factor with num_rows and is close to num_rows divided by the golden ratio.
A member holds a contiguous range of shuffled rows. Shards differ by at most one row, and no index is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class RowSharding:
    """Rows 0 to num_rows - 1, sharded over `num_members` members; with one member a row's slot is the row itself.

    A row's slot is its index within the shard of the member that holds it.
    """

    num_rows: int
    num_members: int

    def __post_init__(self) -> None:
        assert 0 < self.num_rows < 2**31 and self.num_members > 0, (self.num_rows, self.num_members)

    @property
    def multiplier(self) -> int:
        """The a of the hash."""
        if self.num_members == 1:
            return 1
        factor = max(1, round(_GOLDEN * self.num_rows))
        while math.gcd(factor, self.num_rows) != 1:
            factor += 1
        return factor

    def bounds(self, device: torch.device | str = "cpu") -> Tensor:
        """Return where the members' ranges of shuffled rows start, and the end, [num_members + 1] int64."""
        members = torch.arange(self.num_members + 1, dtype=torch.int64, device=device)
        return (members * self.num_rows) // self.num_members

    def shard_size(self, member: int) -> int:
        """Return the number of rows that a member holds."""
        return (member + 1) * self.num_rows // self.num_members - member * self.num_rows // self.num_members

    def shuffled(self, rows: Tensor) -> Tensor:
        """Return the hash of every row [n] int64; the hashes of one member are contiguous, see `bounds`."""
        return rows if self.num_members == 1 else rows * self.multiplier % self.num_rows

    def rows_of(self, member: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the rows that a member holds, in the order of its slots, [shard_size] int64."""
        first = member * self.num_rows // self.num_members
        hashes = torch.arange(first, first + self.shard_size(member), dtype=torch.int64, device=device)
        if self.num_members == 1:
            return hashes
        return hashes * pow(self.multiplier, -1, self.num_rows) % self.num_rows

    def owners(self, rows: Tensor) -> Tensor:
        """Return the member that holds every row [n] int64."""
        return torch.bucketize(self.shuffled(rows), self.bounds(rows.device)[1:], right=True)

    def row_order_bounds(self) -> list[int]:
        """Rows of member j in a checkpoint are bounds[j] to bounds[j + 1] - 1, as DTensor's Shard(0) cuts them."""
        chunk = -(-self.num_rows // self.num_members)
        return [min(member * chunk, self.num_rows) for member in range(self.num_members + 1)]
