"""Sorting a log that does not fit in memory by (user, time, order of the input), or at random where times are equal.

Records are scattered to ranges of users that have at most `PARTITION_RECORDS` records each; a range is then sorted in
memory. The scattered records lie in one file per column, block after block, each block ordered by range; reading a
range back is one short read per block. A user with more records is a range alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from turbogr.data.prepare.spilling import Spill
from turbogr.data.ranges import cut_by_budget, offsets_of
from turbogr.data.vocabulary import Int64Array

PARTITION_RECORDS = 1 << 20
_TIES_SEED = 0x71E5  # never changes, so that figures can be compared


def user_ranges(counts: Int64Array, max_records: int = PARTITION_RECORDS) -> Int64Array:
    """Cut users with `counts` [U] records into ranges of at most `max_records` (or one user); first users [P + 1]."""
    return cut_by_budget(offsets_of(counts), max_records)


class Partitions:
    """Records by range of users; `columns` must contain "user" and "time"."""

    def __init__(self, folder: Path, columns: dict[str, DTypeLike], ranges: Int64Array) -> None:
        self.ranges = ranges
        self.dtypes = columns
        self._spill = Spill(folder, "partitions", columns)
        self._bounds: list[Int64Array] = []

    @property
    def length(self) -> int:
        """Records of all ranges."""
        return self._spill.length

    @property
    def num(self) -> int:
        return len(self.ranges) - 1

    def scatter(self, columns: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], Int64Array]:
        """Order the records of a block by range, stably; also return how many each range gets. Thread-safe."""
        part = np.searchsorted(self.ranges, columns["user"], side="right") - 1
        part = part.astype(np.uint16 if self.num <= 1 << 16 else np.int64)
        order = np.argsort(part, kind="stable")
        sizes = np.bincount(part, minlength=self.num)
        return {name: values[order] for name, values in columns.items()}, sizes

    def append(self, scattered: tuple[dict[str, NDArray[Any]], Int64Array]) -> None:
        """Append what `scatter` returned; blocks must come in the order of the log."""
        columns, sizes = scattered
        bounds = np.zeros(self.num + 1, np.int64)
        np.cumsum(sizes, out=bounds[1:])
        self._bounds.append(bounds + self._spill.length)
        self._spill.append(columns)

    def sorted(self, part: int, tie_keys: Int64Array | None = None) -> dict[str, NDArray[Any]]:
        """Read range `part` and sort it by (user, time), ties in the order of the input or, with `tie_keys`, at random.

        Thread-safe.
        """
        pieces = [(int(bounds[part]), int(bounds[part + 1])) for bounds in self._bounds]
        pieces = [piece for piece in pieces if piece[0] < piece[1]]
        total = sum(stop - start for start, stop in pieces)
        columns: dict[str, NDArray[Any]] = {}
        for name in self._spill.columns:
            values = np.empty(total, self._spill.dtype(name))
            done = 0
            for start, stop in pieces:
                self._spill.read_into(name, start, values[done : done + stop - start])
                done += stop - start
            columns[name] = values
        order = sort_order(columns["user"], columns["time"])
        if tie_keys is not None:
            order = order[shuffled_ties(columns["user"][order], columns["time"][order], tie_keys)]
        return {name: values[order] for name, values in columns.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))

    def remove(self) -> None:
        self._spill.remove()


@dataclass
class SortedLog:
    """The sorted columns "item", "time" and actions; user u's events are offsets[u]:offsets[u + 1]."""

    spill: Spill
    offsets: Int64Array

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    def user_blocks(self, max_events: int = 1 << 20) -> Iterator[tuple[int, int]]:
        """Yield ranges of users that have at most `max_events` events together (or one user)."""
        return pairwise(cut_by_budget(self.offsets, max_events).tolist())

    def users_and_items(self, block: tuple[int, int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read the user and the item of every event of a range of users. Thread-safe."""
        bounds = self.offsets[block[0] : block[1] + 1]
        users = np.repeat(np.arange(block[0], block[1], dtype=np.int32), np.diff(bounds))
        return users, self.spill.read("item", int(bounds[0]), int(bounds[-1]))


def sort_order(users: NDArray[np.integer[Any]], times: Int64Array) -> Int64Array:
    """Return the permutation that sorts by (user, time, index); users and times are not negative.

    User, time and index are packed into one 64-bit word where they fit: NumPy sorts plain words many times faster
    than it sorts indirectly.
    """
    n = len(users)
    if n == 0:
        return np.zeros(0, np.int64)
    first_user, first_time = int(users.min()), int(times.min())
    index_bits = max(n - 1, 1).bit_length()
    time_bits = (int(times.max()) - first_time).bit_length()
    user_bits = (int(users.max()) - first_user).bit_length()
    if index_bits + time_bits + user_bits > 63:
        return np.lexsort((times, users))
    words = (users.astype(np.int64) - first_user) << time_bits
    words += times - first_time
    words <<= index_bits
    words |= np.arange(n)
    words.sort()
    words &= (1 << index_bits) - 1
    return words


def positions_of(users: NDArray[np.integer[Any]]) -> Int64Array:
    """Return the position of every event in its user's sequence, from 0; `users` is sorted."""
    index = np.arange(len(users))
    first = np.ones(len(users), bool)
    np.not_equal(users[1:], users[:-1], out=first[1:])
    return index - np.maximum.accumulate(np.where(first, index, 0))


def tied(users: NDArray[np.integer[Any]], times: Int64Array) -> NDArray[np.bool_]:
    """Return for every event but the first whether it has the user and the time of the one before it, [T - 1]."""
    same: NDArray[np.bool_] = (users[1:] == users[:-1]) & (times[1:] == times[:-1])
    return same


def tie_keys_of(user_ids: Int64Array | pa.Array) -> Int64Array:
    """Return the key of each user for `shuffled_ties`: a number that depends on the raw id alone."""
    if isinstance(user_ids, np.ndarray):
        return user_ids
    return np.fromiter((zlib.crc32(text.as_py().encode()) for text in user_ids), np.int64, len(user_ids))


def shuffled_ties(users: NDArray[np.integer[Any]], times: Int64Array, tie_keys: Int64Array) -> Int64Array:
    """Return a permutation of events sorted by (user, time) that puts those of the same user and time in random order.

    The order depends on `tie_keys` [U] of the user and the event's position alone, not on items, other users or
    ranges; so it stays when a log grows.
    """
    import torch  # takes a second to load, which no other order needs

    from turbogr.random import random_words

    keys = (tie_keys[users] << 32) ^ positions_of(users)
    words = random_words(torch.from_numpy(keys), _TIES_SEED, 1)[:, 0].numpy()
    groups = np.zeros(len(users), np.int64)
    np.cumsum(~tied(users, times), out=groups[1:])
    return np.argsort((groups << 32) | words, kind="stable")
