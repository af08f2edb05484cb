"""The definition of unique_rows in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr.ops.checks import check_index
from turbogr.ops.registry import REFERENCE

BACKEND = REFERENCE


def unique_rows(
    ids: list[Tensor], num_rows: int, bases: Sequence[tuple[int, int]] | None = None
) -> tuple[Tensor, Tensor]:
    """See `turbogr.ops.unique.unique_rows`."""
    check_ids(ids, num_rows, bases)
    rows = [tensor.flatten().to(torch.int64) for tensor in ids]
    if bases is not None:
        rows = [tensor + base for tensor, (base, _) in zip(rows, bases, strict=True)]
    distinct, index = torch.unique(torch.cat(rows), return_inverse=True)
    return distinct, index.to(torch.int32)


def check_ids(ids: list[Tensor], num_rows: int, bases: Sequence[tuple[int, int]] | None) -> None:
    """Require every id inside its table."""
    for number, tensor in enumerate(ids):
        if bases is None:
            check_index("ids", tensor, num_rows)
        else:
            check_index(f"ids[{number}]", tensor, bases[number][1])
