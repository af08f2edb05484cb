"""The definition of random_integers in plain PyTorch."""

from __future__ import annotations

from turbogr.ops.registry import REFERENCE
from turbogr.random import random_integers

__all__ = ["BACKEND", "random_integers"]

BACKEND = REFERENCE
