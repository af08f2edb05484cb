"""Which held-out items choose the checkpoint of a run, and how that is told beside every number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbogr.config import Config
from turbogr.data.split import Split

_ITEMS = {"valid": "validation", "test": "test"}


def selecting_part(config: Config, split: Split) -> str:
    """Return the part that is evaluated during training and chooses the best checkpoint, valid or test."""
    return config.evaluate.part or ("valid" if (split.valid >= 0).any() else "test")


def selected_on(config: Config, split: Split, info: Mapping[str, Any]) -> str | None:
    """Return the part and metric that chose a checkpoint, None where nothing chose it.

    `info` is what `load_for_inference` tells of it.
    """
    if info["which"] != "best":
        return None
    return f"{selecting_part(config, split)} {config.evaluate.metric}"


def describe_checkpoint(config: Config, split: Split, info: Mapping[str, Any], part: str) -> str:
    """Say which checkpoint is measured on `part` and how it was chosen, as the end of a protocol."""
    epoch = info["epoch"]
    at = f"checkpoint of step {info['step']:,}" + ("" if epoch is None else f" (epoch {epoch:g})")
    if info["which"] != "best":
        return f"{at}, the last one"
    selecting = selecting_part(config, split)
    items = "these same held-out items" if selecting == part else f"the {_ITEMS[selecting]} items"
    return f"{at}, chosen by its {config.evaluate.metric} on {items}"
