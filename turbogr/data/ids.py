"""Raw ids of any kind -> 64-bit keys -> rows, in memory that grows with the distinct ids and not with the events.

An integer id is its own key. A text id's key is a 64-bit hash; two texts with the same hash are detected, not merged
(`KeyCollision`), and the caller starts again with another hash seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.vocabulary import Int64Array

_TABLE_LIMIT = 1 << 28
_MIN_MERGE = 1 << 21


class KeyCollision(Exception):
    """Two different texts have the same key; hash again with another seed."""


@dataclass(frozen=True)
class KeyedIds:
    """The ids of a block of rows: `keys` [rows], and of the distinct ids (ascending by key) keys, counts and texts."""

    keys: Int64Array
    distinct: Int64Array
    counts: Int64Array
    texts: pa.Array | None

    @classmethod
    def of_integers(cls, ids: Int64Array) -> KeyedIds:
        distinct, counts = np.unique(ids, return_counts=True)
        return cls(ids, distinct, counts, None)

    @classmethod
    def of_texts(cls, ids: pa.Array, seed: int) -> KeyedIds:
        """Raises KeyCollision."""
        encoded = ids.cast(pa.large_string()).dictionary_encode()
        texts = encoded.dictionary
        keys = hash_texts(texts, seed)
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(keys, kind="stable")
        distinct = keys[order]
        if (distinct[1:] == distinct[:-1]).any():
            raise KeyCollision
        counts = np.bincount(codes, minlength=len(keys))[order]
        return cls(keys[codes], distinct, counts, texts.take(pa.array(order)))


def hash_texts(texts: pa.Array, seed: int) -> Int64Array:
    """Hash every text to 64 bits; the same text and seed give the same key within one process."""
    return pl.Series(pl.from_arrow(texts)).hash(seed).to_numpy().view(np.int64)


class DistinctIds:
    """The distinct ids seen so far and how often; new blocks are collected and merged when they outgrow the rest."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64Array, Int64Array, pa.Array | None]] = []
        self._pending = 0

    def add(self, ids: KeyedIds) -> None:
        """Raises KeyCollision."""
        self._parts.append((ids.distinct, ids.counts, ids.texts))
        self._pending += len(ids.distinct)
        if self._pending > max(_MIN_MERGE, len(self._parts[0][0])):
            self._merge()

    def _merge(self) -> None:
        if len(self._parts) > 1:
            keys = np.concatenate([part[0] for part in self._parts])
            counts = np.concatenate([part[1] for part in self._parts])
            texts = None
            if self._parts[0][2] is not None:
                texts = pa.concat_arrays([part[2] for part in self._parts])
            self._parts = []
            order = np.argsort(keys, kind="stable")
            keys, counts = keys[order], counts[order]
            first = np.ones(len(keys), bool)
            np.not_equal(keys[1:], keys[:-1], out=first[1:])
            if texts is not None:
                texts = texts.take(pa.array(order))
                _check_collisions(texts, first)
                texts = texts.filter(pa.array(first))
            starts = np.flatnonzero(first)
            counts = np.add.reduceat(counts, starts) if len(starts) else counts
            self._parts = [(keys[starts], counts, texts)]
        self._pending = 0

    def finish(self) -> tuple[Int64Array, Int64Array, pa.Array | None]:
        """Return ascending keys, counts and texts (None for integers); raises KeyCollision."""
        if not self._parts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), None
        self._merge()
        return self._parts[0]


def _check_collisions(texts: pa.Array, first: NDArray[np.bool_]) -> None:
    """Raise KeyCollision where a text differs from the one before it although their keys are equal."""
    again = np.flatnonzero(~first)
    if again.size and not pc.all(pc.equal(texts.take(pa.array(again)), texts.take(pa.array(again - 1)))).as_py():
        raise KeyCollision


class KeyIndex:
    """Looks up keys: `rows` [n] of the ascending `keys` [n]; by a direct table where the keys lie close together."""

    def __init__(self, keys: Int64Array, rows: Int64Array) -> None:
        self.keys = keys
        self.rows = rows.astype(np.int32) if len(rows) < 2**31 else rows
        self._table: NDArray[Any] | None = None
        if len(keys):
            span = int(keys[-1]) - int(keys[0]) + 1
            if span <= min(_TABLE_LIMIT, max(4 * len(keys), 1 << 16)):
                self._table = np.full(span, -1, self.rows.dtype)
                self._table[keys - keys[0]] = self.rows

    def rows_of(self, keys: Int64Array) -> Any:
        """Return the row of every key; all keys must be known."""
        if self._table is not None:
            return self._table[keys - self.keys[0]]
        if len(self.keys) < 1 << 14:
            return self.rows[np.searchsorted(self.keys, keys)]
        # A search in ascending order walks the index once instead of missing the cache at every step.
        order = np.argsort(keys)
        rows = np.empty(len(keys), self.rows.dtype)
        rows[order] = self.rows[np.searchsorted(self.keys, keys[order])]
        return rows
