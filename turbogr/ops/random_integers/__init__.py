"""Uniform integers as a function of (seed, key, column): the draw of negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_shape


def random_integers(keys: Tensor, seed: int, num_columns: int, bound: int) -> Tensor:
    """Return integers in [0, bound) for `keys` [T] int64: [T, num_columns] int32, the same in every backend.

    Raises:
        ValueError: a bound outside 1 to 2**31 - 1, or keys that are not an int64 vector.
    """
    check_shape("keys", keys, (None,))
    if keys.dtype != torch.int64:
        raise ValueError(f"keys must be int64, got {keys.dtype}")
    if not 0 < bound < 2**31:
        raise ValueError(f"bound must be between 1 and 2**31 - 1, got {bound}")
    if num_columns < 0:
        raise ValueError(f"num_columns must not be negative, got {num_columns}")
    function = registry.choose("random_integers", keys.device, torch.float32)
    out: Tensor = function(keys, seed, num_columns, bound)
    return out


registry.register_operator("random_integers", package=__name__)
