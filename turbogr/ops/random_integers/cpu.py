"""random_integers on the compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.native import Kernel

_kernel = Kernel("random_integers", "ppiiui")


def _random_integers(keys: Tensor, seed: int, num_columns: int, bound: int) -> Tensor:
    keys = keys.contiguous()
    out = torch.empty(keys.numel(), num_columns, dtype=torch.int32)
    _kernel(keys.data_ptr(), out.data_ptr(), keys.numel(), num_columns, seed, bound)
    return out


def _fake(keys: Tensor, seed: int, num_columns: int, bound: int) -> Tensor:
    return keys.new_empty(keys.shape[0], num_columns, dtype=torch.int32)


native.define("random_integers(Tensor keys, int seed, int num_columns, int bound) -> Tensor", _random_integers, _fake)


def random_integers(keys: Tensor, seed: int, num_columns: int, bound: int) -> Tensor:
    """See `turbogr.ops.random_integers.random_integers`."""
    out: Tensor = torch.ops.turbogr.random_integers(keys, seed, num_columns, bound)
    return out
