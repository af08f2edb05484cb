"""Vocabulary: the raw id of every row and the row of every raw id, memory-mapped both ways.

Raw ids are 64-bit integers or strings. Rows are numbered in ascending order of the raw id (strings: by their UTF-8
bytes), so an id is looked up by binary search in the file. A vocabulary that was extended keeps its old rows and
appends the new ones, each part sorted; it then has an `order` column, the permutation that sorts it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.errors import UserError

Int64Array = NDArray[np.int64]


class Vocabulary:
    """Raw ids by row: `ids` is int64 [n] or an Arrow string array; `order` [n] sorts them, None when sorted already.

    `where` names the file in errors. What comes from a file is checked before it is used, so a damaged one is a
    UserError: the rows that are looked up, or all of them before a pass over the whole vocabulary.
    """

    def __init__(
        self,
        ids: NDArray[np.int64] | pa.Array,
        order: NDArray[np.int64] | None = None,
        where: str = "the vocabulary",
        offsets: Int64Array | None = None,
    ) -> None:
        self.is_text = not isinstance(ids, np.ndarray)
        self._ids: Any = ids
        self.order, self._where = order, where
        self._offsets = offsets  # of text that comes from a file and is not checked yet
        if order is not None and len(order) != len(ids):
            raise self._damaged()

    @classmethod
    def of_text(
        cls,
        offsets: Int64Array,
        data: NDArray[np.uint8],
        order: NDArray[np.int64] | None = None,
        where: str = "the vocabulary",
    ) -> Vocabulary:
        """Wrap UTF-8 `data` [bytes] cut at `offsets` [n + 1] without copying either.

        Raises:
            UserError: the offsets do not begin and end with the data.
        """
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(data):
            raise UserError(f"the ids in {where} are damaged; prepare the store again")
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        ids = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
        return cls(ids, order, where, np.asarray(offsets))

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Any:
        """All raw ids, checked.

        Raises:
            UserError: the file is damaged.
        """
        if self._offsets is not None:
            try:
                self._ids.validate(full=True)
            except pa.ArrowInvalid:
                raise self._damaged() from None
            self._offsets = None
        return self._ids

    def _damaged(self) -> UserError:
        return UserError(f"the ids in {self._where} are damaged; prepare the store again")

    def _take(self, rows: Int64Array) -> pa.Array:
        """Return the texts of rows, checked."""
        if self._offsets is not None:
            starts, ends = self._offsets[rows], self._offsets[rows + 1]
            if rows.size and not (starts.min() >= 0 and (starts <= ends).all() and ends.max() <= self._offsets[-1]):
                raise self._damaged()
        taken = self._ids.take(pa.array(rows))
        try:
            if self._offsets is not None:
                taken.validate(full=True)
        except pa.ArrowInvalid:
            raise self._damaged() from None
        return taken

    @property
    def kind(self) -> str:
        """ "text" or "integer"."""
        return "text" if self.is_text else "integer"

    def fingerprint(self, num_rows: int) -> str:
        """SHA-256 over the raw ids of the first `num_rows` rows: equal for any two vocabularies that share them."""
        digest = hashlib.sha256(self.kind.encode())
        if not self.is_text:
            digest.update(np.ascontiguousarray(self._ids[:num_rows], np.int64).data)
        elif num_rows:
            _, offset_buffer, data_buffer = self.ids.buffers()
            offsets = np.frombuffer(offset_buffer, np.int64)[: num_rows + 1]
            digest.update(np.ascontiguousarray(offsets).data)
            digest.update(memoryview(data_buffer)[: offsets[-1]] if data_buffer else b"")
        return digest.hexdigest()

    def decode(self, rows: Any) -> NDArray[Any]:
        """Return the raw ids of `rows`: int64, or objects of type str; the shape of `rows` is kept."""
        rows = np.asarray(rows)
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"row {rows.min() if rows.min() < 0 else rows.max()} of a vocabulary of {len(self)} ids")
        flat = rows.reshape(-1).astype(np.int64)
        decoded = self._take(flat).to_numpy(zero_copy_only=False) if self.is_text else np.asarray(self._ids[flat])
        return decoded.reshape(rows.shape)  # type: ignore[no-any-return]

    def encode(self, raw_ids: Sequence[Any] | NDArray[Any] | pa.Array) -> Int64Array:
        """Return the int64 row of every raw id, -1 where it is unknown.

        A number may be looked up by its text, and text that looks like a number by the number: ids from CSV files have
        often changed their type.
        """
        if self.is_text:
            return self._encode_text(_as_text(raw_ids))
        numbers, valid = _as_integers(raw_ids)
        if not len(self):
            return np.full(len(numbers), -1, np.int64)
        if self.order is not None and not (self.order.min() >= 0 and self.order.max() < len(self)):
            raise self._damaged()
        position = np.searchsorted(self._ids, numbers, sorter=self.order)
        np.minimum(position, len(self) - 1, out=position)
        rows = position if self.order is None else np.asarray(self.order)[position]
        return np.where(valid & (self._ids[rows] == numbers), rows, -1).astype(np.int64)

    def _encode_text(self, queries: pa.Array) -> Int64Array:
        """Binary search of every query at once; each round reads one id per query from the file.

        Many queries are looked up in a hash table instead, which reads the whole file once.
        """
        if len(queries) > len(self) // 8 and len(queries) > 1000:
            found = pc.index_in(queries, value_set=self.ids, skip_nulls=True)
            return pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]
        low = np.zeros(len(queries), np.int64)
        high = np.full(len(queries), len(self), np.int64)
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_]) // 2
            below = self._less(middle, queries.take(pa.array(open_)))
            low[open_] = np.where(below, middle + 1, low[open_])
            high[open_] = np.where(below, high[open_], middle)
        rows = np.full(len(queries), -1, np.int64)
        inside = np.flatnonzero(low < len(self))
        if inside.size:
            found = self._rows(low[inside])
            same = pc.equal(self._take(found), queries.take(pa.array(inside)))
            same = pc.fill_null(same, False).to_numpy(zero_copy_only=False)
            rows[inside[same]] = found[same]
        return rows

    def _rows(self, sorted_positions: Int64Array) -> Int64Array:
        if self.order is None:
            return sorted_positions
        rows = np.asarray(self.order[sorted_positions], np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self)):
            raise self._damaged()
        return rows

    def _less(self, sorted_positions: Int64Array, queries: pa.Array) -> NDArray[np.bool_]:
        less = pc.less(self._take(self._rows(sorted_positions)), queries)
        return pc.fill_null(less, False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _as_text(raw_ids: Any) -> pa.Array:
    if isinstance(raw_ids, pa.ChunkedArray):
        raw_ids = raw_ids.combine_chunks()
    if isinstance(raw_ids, pa.Array):
        return raw_ids.cast(pa.large_string())
    return pa.array([None if raw is None else str(raw) for raw in raw_ids], pa.large_string())


def _as_integers(raw_ids: Any) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Return int64 values and which of them are integers that fit 64 bits."""
    if isinstance(raw_ids, pa.Array | pa.ChunkedArray):
        raw_ids = raw_ids.to_numpy(zero_copy_only=False) if isinstance(raw_ids, pa.Array) else raw_ids.to_numpy()
    raw_ids = np.asarray(raw_ids) if len(raw_ids) else np.zeros(0, np.int64)
    if raw_ids.dtype.kind == "i" or (raw_ids.dtype.kind == "u" and raw_ids.dtype.itemsize < 8):
        return raw_ids.astype(np.int64), np.ones(len(raw_ids), bool)
    numbers = np.zeros(len(raw_ids), np.int64)
    valid = np.zeros(len(raw_ids), bool)
    for index, raw in enumerate(raw_ids.tolist()):
        number = _integer(raw)
        if number is not None:
            numbers[index], valid[index] = number, True
    return numbers, valid


def _integer(raw: object) -> int | None:
    """Return the integer that `raw` writes in the one canonical way, or None."""
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    if isinstance(raw, str):
        try:
            number = int(raw)
        except ValueError:
            return None
        if str(number) != raw:
            return None
        raw = number
    if isinstance(raw, bool) or not isinstance(raw, int):
        return None
    return raw if -(2**63) <= raw < 2**63 else None
