"""Overrides of a recipe: `section.key=value` texts as the command line has them, or a dict as Python programs do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turbogr.config.values import read_value
from turbogr.errors import UserError

Overrides = Sequence[str] | Mapping[str, Any]
"""["train.epochs=3"], {"train.epochs": 3} or {"train": {"epochs": 3}}."""


def override_texts(overrides: Overrides) -> list[str]:
    """Return overrides as `section.key=value` texts, whose values are YAML; `model=ease` becomes `model.name=ease`.

    Raises:
        UserError: neither a mapping nor a sequence of texts, or a value that no setting can have.
    """
    if isinstance(overrides, Mapping):
        return [_in_full(f"{key}={_text(key, value)}") for key, value in _settings("", overrides)]
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise UserError(
            f"overrides is {overrides!r}; give a dict such as {{'train.epochs': 3}}, or a list such as "
            "['train.epochs=3']"
        )
    return [_in_full(override) for override in overrides]


def _in_full(override: str) -> str:
    """Write out the short form that recipes have, too: `model: ease` names the model."""
    key, _, value = override.partition("=")
    if key.strip() == "model" and isinstance(read_value(value, override), str):
        return f"model.name={value}"
    return override


def _settings(prefix: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting of nested sections by its whole key."""
    for key, value in node.items():
        whole = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _settings(whole, value)
        else:
            yield whole, value


def _text(key: str, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif hasattr(value, "tolist"):  # a number or an array of NumPy
        value = value.tolist()
    try:
        return json.dumps(value, ensure_ascii=False)  # JSON is YAML
    except TypeError:
        raise UserError(
            f"overrides: {key} is {value!r}, and a setting is a number, a text, true, false, none or a list of these"
        ) from None
