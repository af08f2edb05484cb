"""random_integers on a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import triton_runtime
from turbogr.ops.declaration import torch_operator
from turbogr.ops.triton_kernels.launching import element_tile
from turbogr.ops.triton_passes import key_words, seed_words
from turbogr.ops.triton_runtime import DEVICES, kernel

BACKEND = triton_runtime.HOST_TOO_BACKEND


def _empty_output(keys: Tensor, num_columns: int) -> Tensor:
    return keys.new_empty(keys.shape[0], num_columns, dtype=torch.int32)


@torch_operator("random_integers_triton", fake=_empty_output, device=DEVICES)
def random_integers(keys: Tensor, seed: int, num_columns: int, bound: int) -> Tensor:
    """See `turbogr.ops.random_integers.random_integers`."""
    out = _empty_output(keys, num_columns)
    if out.numel():
        tile = element_tile(num_columns)
        grid = -(-keys.shape[0] // tile.block_q), -(-num_columns // tile.block_k)
        kernel("random_bits", "random_integers")[grid](
            key_words(keys), out, *out.shape, *seed_words(seed), bound,
            ROWS=tile.block_q, BLOCK=tile.block_k, **tile.options(),
        )  # fmt: skip
    return out
