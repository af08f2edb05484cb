"""EASE: the linear model from items to items that reconstructs histories best, without using an item for itself.

B = I - P / diag(P) with P = (X^T X + l2 I)^-1, X the users' items (Steck, "Embarrassingly shallow autoencoders", 2019).
`ease` weights all items of a history the same; `ease-recency` weights them by how recent they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turbogr.simple.dense_inverse import invert_in_place
from turbogr.simple.item_to_item import TIE_BREAK, FloatArray, ItemToItem
from turbogr.simple.simple_method import LogFacts, SimpleMethod, Stop, stop_if_asked
from turbogr.simple.training_events import TrainingEvents

MAX_ITEMS = 16384
_CHUNK_ITEMS = 1024
_POPULARITY_WEIGHTS = (TIE_BREAK, 0.02, 0.1)


class Ease(SimpleMethod):
    """All items of a history count the same. The matrix is dense: V² numbers and V³ multiply-adds."""

    name = "ease"

    def refusal(self, facts: LogFacts) -> str | None:
        if facts.num_items <= MAX_ITEMS:
            return None
        gigabytes = 4 * facts.num_items**2 / 1e9
        return (
            f"EASE needs a number for every pair of items: {gigabytes:,.1f} GB for {facts.num_items:,} items; it is "
            f"fitted for at most {MAX_ITEMS:,}"
        )

    def choices(self, num_items: int) -> dict[str, tuple[float, ...]]:
        return {"popularity_weight": _POPULARITY_WEIGHTS, "l2": _penalties(num_items)}

    def fit(self, events: TrainingEvents, settings: Mapping[str, Any], should_stop: Stop | None = None) -> ItemToItem:
        l2 = settings["l2"]
        matrix = events.remember(("ease", l2), lambda: _fit(events, l2, should_stop))
        return ItemToItem(
            matrix,
            events.popularity,
            decay=settings.get("decay", 1.0),
            popularity_weight=settings["popularity_weight"],
        )


class EaseRecency(Ease):
    """The newest item of a history counts most."""

    name = "ease-recency"

    def choices(self, num_items: int) -> dict[str, tuple[float, ...]]:
        return {"decay": (0.85, 0.95, 0.7, 0.5), **super().choices(num_items)}


def _penalties(num_items: int) -> tuple[float, ...]:
    """The penalties to try: fewer where an inverse takes long."""
    if num_items <= 6000:
        return (100.0, 20.0, 500.0)
    return (100.0, 400.0) if num_items <= 10000 else (200.0,)


def _fit(events: TrainingEvents, l2: float, should_stop: Stop | None) -> FloatArray:
    gram = _gram(events, should_stop)
    gram.diagonal().add_(l2)
    inverse = invert_in_place(gram, should_stop)
    inverse.div_(-inverse.diagonal().clone())
    found: FloatArray = inverse.numpy()
    np.fill_diagonal(found, 0.0)
    return found


def _gram(events: TrainingEvents, should_stop: Stop | None) -> Tensor:
    """Return X^T X [V, V], some rows at a time: as a sparse matrix it would take three times the memory."""
    gram = torch.empty(events.num_items, events.num_items)
    items_users = events.matrix.T.tocsr()
    for first in range(0, events.num_items, _CHUNK_ITEMS):
        stop_if_asked(should_stop, "EASE was fitted")
        rows = items_users[first : first + _CHUNK_ITEMS] @ events.matrix
        gram[first : first + _CHUNK_ITEMS] = torch.from_numpy(rows.toarray())
    return gram
