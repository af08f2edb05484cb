"""The definition of keyed_dropout in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops.registry import REFERENCE
from turbogr.random import Dropout, apply_dropout

BACKEND = REFERENCE


def keyed_dropout(x: Tensor, dropout: Dropout, keys: Tensor) -> Tensor:
    """See `turbogr.ops.keyed_dropout.keyed_dropout`."""
    return apply_dropout(x, dropout, keys)
