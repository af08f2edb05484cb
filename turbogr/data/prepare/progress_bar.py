"""A progress bar on stderr for work that takes longer than two seconds."""

from __future__ import annotations

import sys

from tqdm import tqdm

_DELAY = 2.0


class Progress:
    """Shows the stages of a long piece of work, one bar each; silent where `shown` is False or nobody looks on."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    def stage(self, name: str, total: int | None, unit: str) -> tqdm:
        """Start the bar of a stage; close it or use it as a context manager. A `total` of None is unknown."""
        return tqdm(
            total=total,
            desc=name,
            unit=unit,
            unit_scale=True,
            unit_divisor=1024 if unit == "B" else 1000,
            delay=_DELAY,
            file=sys.stderr,
            disable=not (self._shown and sys.stderr.isatty()),
            leave=False,
            dynamic_ncols=True,
        )
