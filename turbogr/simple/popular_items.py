"""The most popular items of the training events, the same for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from turbogr.simple.item_to_item import ItemToItem
from turbogr.simple.simple_method import LogFacts, SimpleMethod, Stop
from turbogr.simple.training_events import TrainingEvents


class PopularItems(SimpleMethod):
    """The score of an item is its number of training events."""

    name = "popularity"

    def refusal(self, facts: LogFacts) -> str | None:
        return None

    def choices(self, num_items: int) -> dict[str, tuple[float, ...]]:
        return {}

    def fit(self, events: TrainingEvents, settings: Mapping[str, Any], should_stop: Stop | None = None) -> ItemToItem:
        nothing = sparse.csr_array((events.num_items, events.num_items), dtype=np.float32)
        return ItemToItem(nothing, events.popularity, popularity_weight=1.0, newest=1)
