"""Scores from items to items: the items of a history, weighted by how recent they are, times a matrix.

EASE, item neighbours, Markov chains and a user's own recent items differ in the matrix only:

    score[j] = sum over history items i of decay^age(i) * (matrix[i, j] + backoff[i] * popularity[j])
               + popularity_weight * popularity[j]

age 0 is the newest event. `backoff` lets an item of which little is known fall back to popularity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from turbogr.data.ranges import offsets_of
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.item_ranking import MatrixScores, Scores, held_queries
from turbogr.evaluation.scorer import Step
from turbogr.evaluation.user_histories import HistoryEvents, UserHistories

Matrix = Any  # sparse.csr_array or NDArray[np.float32]; SciPy has no types
FloatArray = NDArray[np.float32]

TIE_BREAK = 1e-6
"""Weight of popularity where it shall only order items that would have equal scores."""


@dataclass(frozen=True)
class ItemToItem:
    """The scorer; `matrix` [V, V] is sparse or dense, `backoff` and `popularity` [V].

    Only the `newest` events of a history count (None: all). An item that a history has several times counts once, as
    the newest, or with `sum_repeats` every time.
    """

    matrix: Matrix
    popularity: FloatArray
    backoff: FloatArray | None = None
    decay: float = 1.0
    popularity_weight: float = TIE_BREAK
    newest: int | None = None
    sum_repeats: bool = False

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
        weights = history_weights(
            histories.events(self.newest), self.num_items, self.decay, sum_repeats=self.sum_repeats
        )
        found = weights @ self.matrix
        values: FloatArray = found.toarray() if sparse.issparse(found) else found
        share = np.full(values.shape[0], self.popularity_weight, np.float32)
        if self.backoff is not None:
            share += weights @ self.backoff
        values += share[:, None] * self.popularity
        step(values.shape[0])
        return MatrixScores(torch.from_numpy(values))


def history_weights(
    events: HistoryEvents, num_items: int, decay: float, *, sum_repeats: bool = False
) -> sparse.csr_array:
    """Return decay^age of every item of every history, [n, V] sparse; age 0 is a history's newest event."""
    num_histories = len(events.lengths)
    history = np.repeat(np.arange(num_histories), events.lengths)
    age = offsets_of(events.lengths)[1:][history] - 1 - np.arange(len(events.items))
    weights = np.power(np.float64(decay), age).astype(np.float32)
    items = events.items
    if not sum_repeats:
        kept = _newest_of_repeats(history * num_items + items)
        history, items, weights = history[kept], items[kept], weights[kept]
    return sparse.coo_array((weights, (history, items)), shape=(num_histories, num_items)).tocsr()


def _newest_of_repeats(keys: Int64Array) -> Int64Array:
    """Return the index of the last occurrence of every distinct key, ascending."""
    _, first_from_behind = np.unique(keys[::-1], return_index=True)
    return np.sort(len(keys) - 1 - first_from_behind)


def keep_largest(matrix: sparse.csr_array, most: int) -> sparse.csr_array:
    """Return a matrix with the `most` largest values of every row; of equal values the smaller column stays."""
    lengths = np.diff(matrix.indptr)
    long = np.flatnonzero(lengths > most)
    if not len(long):
        return matrix
    kept = np.ones(len(matrix.data), bool)
    for row in long:
        entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
        kept[entries] = _is_largest(matrix.data[entries], matrix.indices[entries], most)
    return sparse.csr_array(
        (matrix.data[kept], matrix.indices[kept], offsets_of(np.minimum(lengths, most))), shape=matrix.shape
    )


def _is_largest(values: FloatArray, columns: NDArray[Any], most: int) -> NDArray[np.bool_]:
    """Return which of more than `most` values are the `most` largest; of equal values those of smaller columns."""
    least = np.partition(values, len(values) - most)[len(values) - most]
    largest: NDArray[np.bool_] = values > least
    equal = np.flatnonzero(values == least)
    largest[equal[np.argsort(columns[equal])][: most - int(largest.sum())]] = True
    return largest
