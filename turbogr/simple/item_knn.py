"""Item neighbours: items that the same users had, by the cosine of their users with shrinkage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from turbogr.simple.item_to_item import TIE_BREAK, ItemToItem, keep_largest
from turbogr.simple.simple_method import LogFacts, SimpleMethod, Stop, stop_if_asked
from turbogr.simple.training_events import TrainingEvents

MAX_EVENTS = 20_000_000
MAX_PAIRS = 200_000_000  # pairs of items of a user, over all users
LEAST_ITEMS = 16  # newest events of a user that count however many pairs there are
NEIGHBOURS = 500
_CHUNK_ITEMS = 2048
_SHRINKAGES = (10.0, 100.0)
_DECAYS = (0.85, 1.0, 0.7, 0.5)
_POPULARITY_WEIGHTS = (TIE_BREAK, 0.02, 0.1)


class ItemKnn(SimpleMethod):
    """similarity(i, j) = users of both / (sqrt(users of i * users of j) + shrinkage), the NEIGHBOURS largest of each i.

    Where users have many items, their newest ones count, so that there are at most MAX_PAIRS pairs.
    """

    name = "item-knn"

    def refusal(self, facts: LogFacts) -> str | None:
        if facts.num_events <= MAX_EVENTS:
            return None
        return f"item neighbours are counted for at most {MAX_EVENTS:,} events, and the log has {facts.num_events:,}"

    def choices(self, num_items: int) -> dict[str, tuple[float, ...]]:
        return {"decay": _DECAYS, "popularity_weight": _POPULARITY_WEIGHTS, "shrinkage": _SHRINKAGES}

    def fit(self, events: TrainingEvents, settings: Mapping[str, Any], should_stop: Stop | None = None) -> ItemToItem:
        shrinkage = settings["shrinkage"]
        matrix = events.remember(("item-knn", shrinkage), lambda: _fit(events, shrinkage, should_stop))
        weight = settings["popularity_weight"]
        return ItemToItem(matrix, events.popularity, decay=settings["decay"], popularity_weight=weight)


def _fit(events: TrainingEvents, shrinkage: float, should_stop: Stop | None) -> sparse.csr_array:
    users_items = events.newest_items(_most_items(events))
    items_users = users_items.T.tocsr()
    num_users = np.asarray(users_items.sum(axis=0)).ravel()
    parts = []
    for first in range(0, events.num_items, _CHUNK_ITEMS):
        stop_if_asked(should_stop, "item neighbours were counted")
        both = (items_users[first : first + _CHUNK_ITEMS] @ users_items).tocoo()
        item, other = both.row + first, both.col
        similarity = both.data / (np.sqrt(num_users[item] * num_users[other]) + np.float32(shrinkage))
        others = item != other
        chunk = (similarity[others].astype(np.float32), (both.row[others], other[others]))
        parts.append(keep_largest(sparse.coo_array(chunk, shape=both.shape).tocsr(), NEIGHBOURS))
    return sparse.vstack(parts, format="csr")


def _most_items(events: TrainingEvents) -> int | None:
    """Return how many newest events of a user count so that there are at most MAX_PAIRS pairs; None for all."""
    lengths = np.bincount(events.users, minlength=events.num_users)
    if (lengths.astype(np.float64) ** 2).sum() <= MAX_PAIRS:
        return None
    return max(LEAST_ITEMS, math.isqrt(MAX_PAIRS // max(1, int((lengths > 0).sum()))))
