"""A Markov chain over skips: what followed an item within the next few events, and not only directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from turbogr.simple.item_to_item import ItemToItem
from turbogr.simple.simple_method import LogFacts, SimpleMethod, Stop, stop_if_asked
from turbogr.simple.training_events import TrainingEvents

MAX_EVENTS = 20_000_000
WINDOW = 10  # events after an item that count
NEWEST = 50  # events of a history that are read
_DISTANCE_DECAY = 0.8
_BACKWARD = (0.0, 0.5)
_VIRTUAL = (30.0, 3.0, 300.0)
_DECAYS = (0.7, 0.3, 0.5, 0.85, 0.95)


class SkipMarkov(SimpleMethod):
    """P(j | i) = (c(i, j) + w p(j)) / (c(i) + w), summed over the newest items i of a history.

    c(i, j) counts j within WINDOW events after i, less the further away, and with the weight `backward` before i. w
    virtual transitions follow popularity p.
    """

    name = "skip-markov"

    def refusal(self, facts: LogFacts) -> str | None:
        if facts.num_events <= MAX_EVENTS:
            return None
        return f"transitions are counted for at most {MAX_EVENTS:,} events, and the log has {facts.num_events:,}"

    def choices(self, num_items: int) -> dict[str, tuple[float, ...]]:
        return {"decay": _DECAYS, "virtual": _VIRTUAL, "backward": _BACKWARD}

    def fit(self, events: TrainingEvents, settings: Mapping[str, Any], should_stop: Stop | None = None) -> ItemToItem:
        counts = events.remember("skip-markov", lambda: _count(events, should_stop))
        return _scorer(events, counts, settings)


def _count(events: TrainingEvents, should_stop: Stop | None) -> sparse.csr_array:
    """Return c(i, j) forward, [V, V]."""
    shape = (events.num_items, events.num_items)
    total = sparse.csr_array(shape, dtype=np.float32)
    for distance in range(1, min(WINDOW, len(events) - 1) + 1):
        stop_if_asked(should_stop, "transitions were counted")
        same = events.users[:-distance] == events.users[distance:]
        pairs = (events.items[:-distance][same], events.items[distance:][same])
        weights = np.full(len(pairs[0]), _DISTANCE_DECAY ** (distance - 1), np.float32)
        total = total + sparse.coo_array((weights, pairs), shape=shape).tocsr()
    return total


def _scorer(events: TrainingEvents, counts: sparse.csr_array, settings: Mapping[str, Any]) -> ItemToItem:
    if settings["backward"]:
        counts = (counts + counts.T * np.float32(settings["backward"])).tocsr()
    virtual = settings["virtual"]
    inverse = 1.0 / (counts.sum(axis=1) + virtual)
    matrix = (sparse.diags_array(inverse.astype(np.float32)) @ counts).tocsr()
    # `popularity` is a share of the most popular item's events, and the virtual transitions follow shares of all.
    share = events.counts.max() / max(1, len(events))
    backoff = (virtual * share * inverse).astype(np.float32)
    return ItemToItem(matrix, events.popularity, backoff, decay=settings["decay"], newest=NEWEST)
