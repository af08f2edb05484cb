"""random_integers on the compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.declaration import torch_operator
from turbogr.ops.native import Kernel

BACKEND = native.BACKEND

_kernel = Kernel("random_integers", "int64 *keys; int32 *out; int64 num_rows, num_columns; uint64 seed; int64 bound")


def _empty_output(keys: Tensor, num_columns: int) -> Tensor:
    return keys.new_empty(keys.shape[0], num_columns, dtype=torch.int32)


@torch_operator("random_integers", fake=_empty_output)
def random_integers(keys: Tensor, seed: int, num_columns: int, bound: int) -> Tensor:
    """See `turbogr.ops.random_integers.random_integers`."""
    keys = keys.contiguous()
    out = _empty_output(keys, num_columns)
    _kernel(keys.data_ptr(), out.data_ptr(), keys.numel(), num_columns, seed, bound)
    return out
