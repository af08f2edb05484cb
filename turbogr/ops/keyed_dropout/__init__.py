"""Dropout by the keys of the rows, where no other operator takes it along."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import native, registry
from turbogr.ops.checks import check_keys, check_shape
from turbogr.ops.keyed_dropout import cpu, reference
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


registry.register_reference("keyed_dropout", reference.keyed_dropout)
registry.register("keyed_dropout", registry.Backend("cpu", cpu.keyed_dropout, native.why_not))
