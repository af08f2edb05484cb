"""keyed_dropout on a Triton kernel; the backward draws the mask again."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import triton_passes, triton_runtime
from turbogr.ops.declaration import set_gradient, torch_operator
from turbogr.ops.norm_linear.cpu import strided_rows
from turbogr.ops.triton_runtime import DEVICES
from turbogr.random import Dropout

BACKEND = triton_runtime.BACKEND


@torch_operator("keyed_dropout_triton", fake=lambda x: x.new_empty(x.shape), device=DEVICES)
def _drop(x: Tensor, keys: Tensor, rate: float, seed: int) -> Tensor:
    return triton_passes.drop_elements(strided_rows(x), triton_passes.dropout_words(keys, rate, seed, x))


set_gradient(_drop, _drop, of="x")


def keyed_dropout(x: Tensor, dropout: Dropout, keys: Tensor) -> Tensor:
    """See `turbogr.ops.keyed_dropout.keyed_dropout`."""
    out: Tensor = _drop(x, keys, *dropout)
    return out
