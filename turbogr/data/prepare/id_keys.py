"""Raw ids of any kind -> 64-bit keys -> numbers, in memory that grows with the distinct ids and not with the events.

An integer id is its own key. A text id's key is a 64-bit hash; two texts with the same hash are detected, not merged
(`KeyCollision`), and the caller starts again with another hash seed.
"""

from __future__ import annotations

import dataclasses
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
    """The ids of a block of n records: `keys` [n], and keys, counts and texts of the distinct ids, ascending by key.

    `counts` is None where they are not needed, `texts` where ids are integers.
    """

    keys: Int64Array
    distinct: Int64Array
    counts: Int64Array | None
    texts: pa.Array | None

    @classmethod
    def of_integers(cls, ids: Int64Array, counted: bool) -> KeyedIds:
        # numpy.unique without counts uses a hash table, which is many times slower here than sorting.
        ascending = np.sort(ids)
        starts = np.flatnonzero(_firsts(ascending))
        counts = np.diff(starts, append=len(ascending)) if counted else None
        return cls(ids, ascending[starts], counts, None)

    @classmethod
    def of_texts(cls, ids: pa.Array, counted: bool, seed: int) -> KeyedIds:
        """Raises KeyCollision."""
        encoded = ids.cast(pa.large_string()).dictionary_encode()
        texts = encoded.dictionary
        keys = hash_texts(texts, seed)
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(keys, kind="stable")
        distinct = keys[order]
        if (distinct[1:] == distinct[:-1]).any():
            raise KeyCollision
        counts = np.bincount(codes, minlength=len(keys))[order] if counted else None
        return cls(keys[codes], distinct, counts, texts.take(pa.array(order)))


def _firsts(ascending: Int64Array) -> NDArray[np.bool_]:
    """Mark the first of every run of equal values."""
    first = np.ones(len(ascending), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return first


def hash_texts(texts: pa.Array, seed: int) -> Int64Array:
    """Hash every text to 64 bits; the same text and seed give the same key within one process."""
    return pl.Series(pl.from_arrow(texts)).hash(seed).to_numpy().view(np.int64)


class DistinctIds:
    """The distinct ids seen so far and how often; new blocks are collected and merged when they outgrow the rest."""

    def __init__(self) -> None:
        self._parts: list[KeyedIds] = []
        self._pending = 0

    def add(self, ids: KeyedIds) -> None:
        """Raises KeyCollision."""
        self._parts.append(dataclasses.replace(ids, keys=_NONE))
        self._pending += len(ids.distinct)
        if self._pending > max(_MIN_MERGE, len(self._parts[0].distinct) // 2):
            self._merge()

    def _merge(self) -> None:
        parts, self._parts, self._pending = self._parts, [], 0
        if len(parts) <= 1:
            self._parts = parts
        elif parts[0].texts is None and parts[0].counts is None:
            keys = np.concatenate([part.distinct for part in parts])
            del parts
            keys.sort()
            self._parts = [KeyedIds(_NONE, keys[_firsts(keys)], None, None)]
        else:
            self._parts = [_merged(parts)]

    def finish(self) -> KeyedIds:
        """Return the distinct ids (`keys` is empty); raises KeyCollision."""
        self._merge()
        return self._parts[0] if self._parts else KeyedIds(_NONE, _NONE, _NONE, None)


_NONE = np.zeros(0, np.int64)


def _merged(parts: list[KeyedIds]) -> KeyedIds:
    """Merge distinct ids with their counts and texts."""
    keys = np.concatenate([part.distinct for part in parts])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = _firsts(keys)
    starts = np.flatnonzero(first)
    counts = texts = None
    if parts[0].counts is not None:
        counts = np.add.reduceat(np.concatenate([part.counts for part in parts])[order], starts)
    if parts[0].texts is not None:
        texts = pa.concat_arrays([part.texts for part in parts]).take(pa.array(order))
        _check_collisions(texts, first)
        texts = texts.filter(pa.array(first))
    return KeyedIds(_NONE, keys[starts], counts, texts)


def _check_collisions(texts: pa.Array, first: NDArray[np.bool_]) -> None:
    """Raise KeyCollision where a text differs from the one before it although their keys are equal."""
    again = np.flatnonzero(~first)
    if again.size and not pc.all(pc.equal(texts.take(pa.array(again)), texts.take(pa.array(again - 1)))).as_py():
        raise KeyCollision


class KeyIndex:
    """Looks up the number of a key: `numbers` [n] of the ascending `keys` [n], None where key k has number k.

    Where the keys lie close together, a table with an entry for every possible key serves as the index.
    """

    def __init__(self, keys: Int64Array, numbers: NDArray[np.integer[Any]] | None) -> None:
        self.dtype = np.dtype(np.int32 if len(keys) < 2**31 else np.int64)
        self._keys = keys
        self._numbers = None if numbers is None else numbers.astype(self.dtype, copy=False)
        self._table: NDArray[Any] | None = None
        if len(keys):
            span = int(keys[-1]) - int(keys[0]) + 1
            if span <= min(_TABLE_LIMIT, max(4 * len(keys), 1 << 16)):
                self._table = np.full(span, -1, self.dtype)
                self._table[keys - keys[0]] = (
                    np.arange(len(keys), dtype=self.dtype) if numbers is None else self._numbers
                )

    def numbers_of(self, keys: Int64Array) -> Any:
        """Return the number of every key; all keys must be known."""
        if self._table is not None:
            return self._table[keys - self._keys[0]]
        if len(self._keys) < 1 << 14:
            return self._at(np.searchsorted(self._keys, keys))
        # Searching in ascending order reads the index once from start to end, which the cache favours.
        order = np.argsort(keys)
        numbers = np.empty(len(keys), self.dtype)
        numbers[order] = self._at(np.searchsorted(self._keys, keys[order]))
        return numbers

    def _at(self, index: NDArray[np.integer[Any]]) -> NDArray[Any]:
        return index.astype(self.dtype) if self._numbers is None else self._numbers[index]
