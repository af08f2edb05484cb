"""Dropout whose mask is a function of the rows' keys, as an operator of its own."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_keys, check_shape
from turbogr.random import Dropout


def keyed_dropout(x: Tensor, dropout: Dropout | None, keys: Tensor) -> Tensor:
    """Return x [T, width] with elements dropped and the kept ones scaled by 1 / (1 - rate); None drops nothing.

    What is dropped depends on the seed, the row's key (`keys` [T] int64) and the column alone.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("x", x, (None, None))
    check_keys(keys, x.shape[0])
    if dropout is None or dropout.rate == 0.0:
        return x
    out: Tensor = registry.choose("keyed_dropout", x.device, x.dtype)(x, dropout, keys)
    return out


registry.register_operator("keyed_dropout", package=__name__, per_token=True)
