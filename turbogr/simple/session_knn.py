"""Neighbouring users: those whose items resemble the newest items of a history, and what they had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse

from turbogr.evaluation.item_ranking import MatrixScores, Scores, held_queries
from turbogr.evaluation.scorer import Step
from turbogr.evaluation.user_histories import UserHistories
from turbogr.simple.item_to_item import TIE_BREAK, FloatArray, history_weights, keep_largest
from turbogr.simple.simple_method import LogFacts, SimpleMethod, Stop
from turbogr.simple.training_events import TrainingEvents

MAX_EVENTS = 5_000_000
NEWEST = 50
_NEIGHBOURS = (100, 500)
_DECAYS = (0.7, 0.5, 0.85, 0.95)
_POPULARITY_WEIGHTS = (TIE_BREAK, 0.1)


class SessionKnn(SimpleMethod):
    """A user's similarity is the sum of decay^age * idf over the items in common, divided by sqrt(number of items).

    An item's score is the sum of the similarities of those of the closest `neighbours` users who had it.
    """

    name = "session-knn"

    def refusal(self, facts: LogFacts) -> str | None:
        if facts.num_events <= MAX_EVENTS:
            return None
        return (
            f"neighbouring users are searched among at most {MAX_EVENTS:,} events, and the log has {facts.num_events:,}"
        )

    def choices(self, num_items: int) -> dict[str, tuple[float, ...]]:
        return {"decay": _DECAYS, "neighbours": _NEIGHBOURS, "popularity_weight": _POPULARITY_WEIGHTS}

    def fit(
        self, events: TrainingEvents, settings: Mapping[str, Any], should_stop: Stop | None = None
    ) -> NeighbouringUsers:
        by_item = events.remember("session-knn", lambda: _by_item(events))
        return NeighbouringUsers(events.matrix, by_item, events.popularity, **settings)


def _by_item(events: TrainingEvents) -> Any:
    """Return what an item in common adds to the similarity of a user, [V, U] sparse."""
    had = events.matrix
    num_users_of = np.asarray(had.sum(axis=0)).ravel()
    idf = np.log1p(events.num_users / np.maximum(num_users_of, 1.0)).astype(np.float32)
    scale = (1.0 / np.sqrt(np.maximum(np.diff(had.indptr), 1))).astype(np.float32)
    return (sparse.diags_array(idf) @ had.T @ sparse.diags_array(scale)).tocsr()


@dataclass(frozen=True)
class NeighbouringUsers:
    """The scorer: `had` [U, V] are the users' items, `by_item` [V, U] what an item in common adds to a similarity."""

    had: sparse.csr_array
    by_item: sparse.csr_array
    popularity: FloatArray
    neighbours: float
    decay: float
    popularity_weight: float

    @property
    def num_items(self) -> int:
        return len(self.popularity)

    @property
    def num_workers(self) -> int:
        return torch.get_num_threads()

    @property
    def batch_size(self) -> int:
        return held_queries(self.num_items)

    def score(self, histories: UserHistories, step: Step) -> Scores:
        weights = history_weights(histories.events(NEWEST), self.num_items, self.decay)
        similar = keep_largest((weights @ self.by_item).tocsr(), int(self.neighbours))
        similar.sort_indices()
        values: FloatArray = (similar @ self.had).toarray()
        largest = np.maximum(values.max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        values /= largest
        values += self.popularity_weight * self.popularity
        step(values.shape[0])
        return MatrixScores(torch.from_numpy(values))
