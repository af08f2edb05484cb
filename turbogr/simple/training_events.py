"""The training events of a store in memory, as the arrays and sparse matrices that simple methods are fitted on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from turbogr.data.split import Split
from turbogr.data.store import Store, read_range
from turbogr.data.vocabulary import Int64Array

Fitted = TypeVar("Fitted")

_SMALL_CATALOGUE = 6000  # items; a larger one's matrix of EASE takes up to a gigabyte


@dataclass(frozen=True)
class TrainingEvents:
    """Events that train, in the order of the store: `users` [E] and `items` [E]."""

    users: Int64Array
    items: Int64Array
    num_users: int
    num_items: int
    _remembered: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, store: Store, split: Split) -> TrainingEvents:
        users, items = [], []
        for first, last in store.user_blocks():
            start, stop = int(store.offsets[first]), int(store.offsets[last])
            user = np.repeat(np.arange(first, last), np.diff(store.offsets[first : last + 1]))
            training = np.arange(start, stop) < split.train_end[user]
            users.append(user[training])
            items.append(read_range(store.items, start, stop)[training].astype(np.int64))
        return cls(np.concatenate(users), np.concatenate(items), store.num_users, store.num_items)

    def __len__(self) -> int:
        return len(self.items)

    @functools.cached_property
    def counts(self) -> Int64Array:
        """Events of every item, [V]."""
        return np.bincount(self.items, minlength=self.num_items)

    @functools.cached_property
    def popularity(self) -> NDArray[np.float32]:
        """Events of every item as a share of the most popular one's, [V]."""
        shares: NDArray[np.float32] = (self.counts / max(1, self.counts.max())).astype(np.float32)
        return shares

    @functools.cached_property
    def matrix(self) -> sparse.csr_array:
        """Which user had which item, [U, V], 1 or absent."""
        return self.newest_items(None)

    def remember(self, key: Hashable, make: Callable[[], Fitted]) -> Fitted:
        """Return what `make` makes, or what it made for the same key lately: settings often share a costly part."""
        if key not in self._remembered:
            while len(self._remembered) >= (4 if self.num_items <= _SMALL_CATALOGUE else 2):
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[key] = make()
        fitted: Fitted = self._remembered[key]
        return fitted

    def newest_items(self, most: int | None) -> sparse.csr_array:
        """Return which user had which item, [U, V], of each user's newest `most` events."""
        users, items = self.users, self.items
        if most is not None:
            ends = np.searchsorted(users, np.arange(self.num_users), side="right")
            newest = np.arange(len(users)) >= (ends - most)[users]
            users, items = users[newest], items[newest]
        ones = np.ones(len(users), np.float32)
        found = sparse.coo_array((ones, (users, items)), shape=(self.num_users, self.num_items)).tocsr()
        found.data[:] = 1
        return found
