"""The distinct rows that a batch needs, and where each of its ids finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import native, registry
from turbogr.ops.checks import check_index, check_shape
from turbogr.ops.unique import cpu, reference


def unique_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return (distinct ids in rising order [R] int64, index [n] int64 with distinct[index] == ids).

    ids [n] int64 with values in [0, num_rows).

    Raises:
        ValueError: an id outside the table.
    """
    check_shape("ids", ids, (None,))
    check_index("ids", ids, num_rows)
    distinct, index = registry.choose("unique_rows", ids.device, torch.float32)(ids, num_rows)
    return distinct, index


registry.register_reference("unique_rows", reference.unique_rows)
registry.register("unique_rows", registry.Backend("cpu", cpu.unique_rows, native.why_not))
