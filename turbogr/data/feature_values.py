"""The tensors of features and actions that a batch carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.jagged import Jagged

FeatureValues = Tensor | Jagged
"""Of n rows: int64 [n] (category), Jagged int64 of n rows (categories), float32 [n, 2] (number), [n, k] (vector)."""


def feature_values(column: FeatureColumn, rows: Int64Array) -> FeatureValues:
    """Return a feature's values for `rows` [n] of events, items or users; row -1 has none.

    Categories are rows of the feature's table, 0 for one that is not given; floats are those of `FeatureColumn.floats`.
    """
    kind = column.info.kind
    if kind == "category":
        return torch.from_numpy(column.table_rows(rows))
    if kind == "categories":
        values, lengths = column.table_row_lists(rows)
        return Jagged.from_lengths(torch.from_numpy(values), torch.from_numpy(lengths))
    return torch.from_numpy(column.floats(rows))


def token_features(
    store: Store, columns: Mapping[str, str], items: Int64Array, events: Int64Array
) -> dict[str, FeatureValues]:
    """Return the features of events and items among `columns` (key by name) for tokens: `events` [T] on `items` [T].

    A key that is not among the store's features is a kept column of whole numbers from 0 on.
    """
    found: dict[str, FeatureValues] = {}
    for name, key in columns.items():
        column = store.features.get(key)
        if column is None:
            found[name] = kept_rows(store.actions[key][events])
        elif column.owner in ("event", "item"):
            found[name] = feature_values(column, items if column.owner == "item" else events)
    return found


def user_features(store: Store, columns: Mapping[str, str], users: Int64Array) -> dict[str, FeatureValues]:
    """Return the features of users among `columns` for `users` [B]."""
    return {name: feature_values(column, users) for name, column in _owned(store, columns, "user")}


def action_values(store: Store, columns: Mapping[str, str], events: Int64Array) -> dict[str, Tensor]:
    """Return the actions among `columns` of `events` [T], float32, NaN where none is given."""
    return {
        name: torch.from_numpy(np.array(column.values[events], np.float32))
        for name, column in _owned(store, columns, "action")
    }


def _owned(store: Store, columns: Mapping[str, str], owner: str) -> list[tuple[str, FeatureColumn]]:
    found = [(name, store.features.get(key)) for name, key in columns.items()]
    return [(name, column) for name, column in found if column is not None and column.owner == owner]


def kept_rows(values: NDArray[Any]) -> Tensor:
    """Return the table rows of a kept column's values [T]: value v has row v + 1, and row 0 is a missing value."""
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), -1, values)
    return torch.from_numpy(np.array(values, np.int64) + 1)


def select(values: FeatureValues, chosen: Tensor) -> FeatureValues:
    """Return the rows `chosen` [m] of a feature's values."""
    if isinstance(values, Tensor):
        return values[chosen]
    lengths = values.lengths[chosen]
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    index = torch.arange(int(lengths.sum()), device=lengths.device)
    index += torch.repeat_interleave(values.offsets[:-1][chosen] - offsets[:-1], lengths)
    return Jagged(values.values[index], offsets)
