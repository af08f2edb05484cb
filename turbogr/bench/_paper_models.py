"""The models of the paper's tables: two families in five sizes, by the names that figures carry, such as hstu_large."""

from __future__ import annotations

from turbogr.config import PRESETS

_MODELS = {"hstu": "hstu", "fuxi": "fuxi"}

PAPER_CASES = tuple(f"{family}_{size}" for family in _MODELS for size in PRESETS)


def paper_model(case: str) -> tuple[str, str]:
    """Return `model.name` and `model.preset` of a case."""
    family, _, size = case.partition("_")
    return _MODELS[family], size
