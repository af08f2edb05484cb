"""What losses and samplers know of a run besides their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = Callable[[], NDArray[np.int64]]
"""How often each item occurs in the training events, [V]; called only if it is needed."""


@dataclass(frozen=True)
class LossContext:
    """The number of items, the run's seed, how often items occur, and the sections of all chosen components by name.

    Without `counts` all items count as equally frequent.
    """

    num_items: int
    seed: int
    counts: Counts | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def item_counts(self) -> NDArray[np.int64]:
        """Return how often each item occurs in the training events, [V]."""
        return np.ones(self.num_items, np.int64) if self.counts is None else self.counts()
