"""The item table of one process: which rows a batch needs, and their vectors as one leaf tensor.

A sharded table offers the same two things, so nothing above this module can tell where rows live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from turbogr.ops import unique_rows

_ROWS_AT_ONCE = 65536


@dataclass(frozen=True)
class WorkingSet:
    """The distinct rows that a batch needs.

    `ids` [R] rising; `index` [n] int32 places each requested id in `ids`; `rows` [R, d] is a leaf whose gradient is the sum
    over all uses of each row.
    """

    ids: Tensor
    index: Tensor
    rows: Tensor


class ItemTable:
    """`weight` [num_items, dim], drawn from a truncated normal of standard deviation 0.02."""

    def __init__(self, num_items: int, dim: int, *, device: torch.device | str = "cpu") -> None:
        self.weight = torch.empty(num_items, dim, device=device)

    @property
    def num_items(self) -> int:
        return self.weight.shape[0]

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all rows anew, block by block, so that a large table needs no second copy of itself."""
        with torch.no_grad():
            for rows in self.weight.split(_ROWS_AT_ONCE):
                rows.copy_(nn.init.trunc_normal_(torch.empty(rows.shape), std=0.02, generator=generator))

    def fetch(self, ids: Tensor | Sequence[Tensor]) -> WorkingSet:
        """Return the working set of `ids`, int64 or int32, one tensor or several, duplicates allowed.

        Raises:
            ValueError: an id outside the table.
        """
        distinct, index = unique_rows(ids, self.num_items)
        rows = self.weight.index_select(0, distinct).requires_grad_()
        return WorkingSet(distinct, index, rows)
