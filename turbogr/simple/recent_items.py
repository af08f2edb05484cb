"""A user's own items again, the recent and the frequent ones first, for logs in which people come back to items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from turbogr.simple.item_to_item import ItemToItem
from turbogr.simple.simple_method import LogFacts, SimpleMethod, Stop
from turbogr.simple.training_events import TrainingEvents

_DECAYS = (0.95, 0.5, 0.8, 0.9, 0.98, 0.99, 0.995, 1.0)


class RecentItems(SimpleMethod):
    """The score of an item is the sum of decay^age over the user's events with it; then follow the popular items."""

    name = "recent-items"
    needs_repeats = True

    def refusal(self, facts: LogFacts) -> str | None:
        return None

    def choices(self, num_items: int) -> dict[str, tuple[float, ...]]:
        return {"decay": _DECAYS}

    def fit(self, events: TrainingEvents, settings: Mapping[str, Any], should_stop: Stop | None = None) -> ItemToItem:
        identity = sparse.eye_array(events.num_items, dtype=np.float32, format="csr")
        return ItemToItem(identity, events.popularity, decay=settings["decay"], sum_repeats=True)
