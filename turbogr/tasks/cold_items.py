"""Vectors of items without a training event, from their features.

A trained table has learnt nothing of an item that nobody has used. Where the store has features of items, such an item
gets the vector of a known item of its kind: of those that are most similar to it, the one with the most events that has
not lent its vector yet, so that new items do not crowd the lists of the best. What is similar is learnt: a linear map
from the features to the unit vectors of the known items (ridge regression, weighted by how well an item is known; its
strength is the best of a few on every tenth item, left out of the fit) makes a vector of every item, and cosines of
these count. These vectors themselves would not do: means of many, they are never close enough to a user to be among the
best.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import linalg
from torch import Tensor
from torch.nn import functional as F

from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.ranges import offsets_of
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array

_STRENGTHS = (0.3, 3.0, 30.0)
_HALF_KNOWN = 5.0  # events at which an item counts half as much as one with very many
_TENTH = 10
_SIMILAR = 20  # known items of which the one with the most events lends its vector; of few items a twentieth
_MOST_KNOWN = 20_000  # items that are compared with, those with the most events
_AT_ONCE = 1_000


def cold_items(store: Store, train_end: Int64Array) -> Int64Array:
    """Return the rows of items without a training event, if the store has features that tell items apart."""
    if not _columns(store):
        return np.zeros(0, np.int64)
    return np.flatnonzero(store.item_counts(train_end) == 0)


def with_cold_items(table: Tensor, store: Store, train_end: Int64Array) -> Tensor:
    """Return the table [V, D], with the rows of items without a training event made from their features."""
    cold = cold_items(store, train_end)
    if not len(cold) or len(cold) == store.num_items:
        return table
    counts = store.item_counts(train_end)
    known = np.flatnonzero(counts > 0)
    x = _design(store)
    unit = F.normalize(table[torch.from_numpy(known)].detach().float().cpu(), dim=1).numpy().astype(np.float64)
    weights = counts[known] / (counts[known] + _HALF_KNOWN)
    tested = np.arange(len(known)) % _TENTH == _TENTH - 1
    best = _STRENGTHS[0]
    if tested.any() and not tested.all():
        fits = [_ridge(x[known[~tested]], unit[~tested], weights[~tested], strength) for strength in _STRENGTHS]
        values = [_agreement(x[known[tested]] @ fit, unit[tested], weights[tested]) for fit in fits]
        best = _STRENGTHS[int(np.argmax(values))]
    fit = _ridge(x[known], unit, weights, best)
    common = known[np.argsort(-counts[known], kind="stable")[:_MOST_KNOWN]]
    lenders = _lenders(_unit(x[cold] @ fit), _unit(x[common] @ fit))
    filled = table.clone()
    filled[torch.from_numpy(cold)] = table[torch.from_numpy(common[lenders])]
    return filled


def _lenders(wanted: np.ndarray, common: np.ndarray) -> Int64Array:
    """Return for every row of `wanted` the first of the rows of `common` that are among the most similar ones and have
    not been taken; the most similar one where all are."""
    num = max(1, min(_SIMILAR, len(common) // _SIMILAR))
    found, taken = np.zeros(len(wanted), np.int64), np.zeros(len(common), bool)
    for first in range(0, len(wanted), _AT_ONCE):
        cosines = wanted[first : first + _AT_ONCE] @ common.T
        similar = np.argpartition(-cosines, num - 1, axis=1)[:, :num]
        for place, rows in enumerate(similar):
            free = rows[~taken[rows]]
            found[first + place] = free.min() if len(free) else cosines[place].argmax()
            taken[found[first + place]] = True
    return found


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)  # type: ignore[no-any-return]


def _ridge(x: sparse.csr_matrix, y: np.ndarray, weights: np.ndarray, strength: float) -> np.ndarray:
    """Return the map [features, D] of least weighted squares plus strength · |map|²."""
    root = np.sqrt(weights)[:, None]
    weighted = x.multiply(root).tocsr()
    gram = (weighted.T @ weighted + strength * sparse.identity(x.shape[1])).tocsr()
    right = weighted.T @ (root * y)
    found = [linalg.cg(gram, column, rtol=1e-6, maxiter=300)[0] for column in right.T]
    return np.stack(found, axis=1)


def _agreement(found: np.ndarray, wanted: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean cosine of rows."""
    return float((weights * (_unit(found) * wanted).sum(1)).sum() / weights.sum())


def _columns(store: Store) -> list[FeatureColumn]:
    return [column for column in store.features.values() if column.owner == "item"]


def _design(store: Store) -> sparse.csr_matrix:
    """Return the features of all items, [V, columns]: categories one-hot, numbers and vectors as they are, and a 1."""
    rows = np.arange(store.num_items)
    parts: list[sparse.csr_matrix] = [sparse.csr_matrix(np.ones((store.num_items, 1)))]
    for column in _columns(store):
        if column.info.kind == "category":
            parts.append(_one_hot(column.table_rows(rows), np.ones(len(rows), np.int64), column.info.num_rows))
        elif column.info.kind == "categories":
            parts.append(_one_hot(*column.table_row_lists(rows), column.info.num_rows))
        elif column.info.kind == "vector":
            floats = column.floats(rows).astype(np.float64)
            parts.append(sparse.csr_matrix(floats / np.maximum(np.linalg.norm(floats, axis=1, keepdims=True), 1e-12)))
        else:
            parts.append(sparse.csr_matrix(column.floats(rows).astype(np.float64)))
    return sparse.hstack(parts, "csr")


def _one_hot(codes: Int64Array, lengths: Int64Array, size: int) -> sparse.csr_matrix:
    values = np.repeat(1 / np.maximum(lengths, 1), lengths)
    return sparse.csr_matrix((values, codes, offsets_of(lengths)), (len(lengths), size))
