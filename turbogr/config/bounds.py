"""Checks that the numbers of a section are in range."""

from __future__ import annotations

import math
from typing import Any

from turbogr.errors import UserError


def positive(values: Any, *names: str, section: str | None = None) -> None:
    """Raise UserError if a value that is set is not above 0; `section` is the name in messages, if not the class's."""
    for name in names:
        value = getattr(values, name)
        if value is not None and not value > 0:
            raise UserError(f"{section or _section_name(values)}.{name} must be positive, got {value}")


def between(section: Any, low: float, high: float, *names: str) -> None:
    """Raise UserError if a value that is set is out of a range, bounds included."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not low <= value <= high:
            bounds = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
            raise UserError(f"{_section_name(section)}.{name} must be {bounds}, got {value}")


def _section_name(section: Any) -> str:
    return type(section).__name__.removesuffix("Config").lower()
