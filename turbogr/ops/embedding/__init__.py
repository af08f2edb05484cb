"""Look-up, scale, position and dropout in one pass over the real ids of a jagged batch."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_dtypes, check_keys, check_shape
from turbogr.random import Dropout


def embed(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor,
    positions: Tensor,
    *,
    scale: float,
    dropout: Dropout | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Return dropout(rows[index] * scale + position_rows[positions]), [T, d].

    rows [R, d], index [T], position_rows [N, d], positions [T]; `keys` [T] int64 name the tokens for dropout. The
    gradient of `rows` adds up duplicate indices.

    Raises:
        ValueError: shapes that do not fit, an index outside its table, or dropout without keys.
    """
    check_shape("rows", rows, (None, None))
    check_shape("position_rows", position_rows, (None, rows.shape[1]))
    check_shape("index", index, (None,))
    check_shape("positions", positions, (index.shape[0],))
    check_dtypes(rows.dtype, position_rows=position_rows)
    if dropout is not None:
        check_keys(keys, index.shape[0])
    function = registry.choose("embed", rows.device, rows.dtype)
    out: Tensor = function(rows, index, position_rows, positions, scale, dropout, keys)
    return out


registry.register_operator("embed", package=__name__, per_token=True)
