"""The vectors of several features' ids in one look-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_shape


def look_up_rows(rows: Tensor, index: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return rows[index] in pieces of `counts` vectors, each a tensor of its own [count, d].

    rows [R, d]; index [n] int64 or int32, n the sum of `counts`. The gradient of `rows` adds up duplicate indices, of
    all pieces at once: it is one tensor [R, d] however many pieces there are.

    Raises:
        ValueError: shapes that do not fit, or an index outside the rows.
    """
    check_shape("rows", rows, (None, None))
    check_shape("index", index, (None,))
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"index must be int64 or int32, got {index.dtype}")
    if any(count < 0 for count in counts) or sum(counts) != index.shape[0]:
        raise ValueError(f"counts must add up to the {index.shape[0]} elements of index, got {list(counts)}")
    pieces: list[Tensor] = registry.choose("look_up_rows", rows.device, rows.dtype)(rows, index, list(counts))
    return pieces


registry.register_operator("look_up_rows", package=__name__)
