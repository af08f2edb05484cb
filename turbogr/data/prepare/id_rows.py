"""Which row of the store every raw id gets, with and without a store that is extended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.prepare.id_keys import KeyedIds, KeyIndex
from turbogr.data.store_writer import StoreWriter
from turbogr.data.vocabulary import Int64Array, Vocabulary
from turbogr.errors import UserError


@dataclass
class IdRows:
    """Which row every id gets.

    While the log is sorted, an id is represented by its *number*: known ids in the order of their rows, then new ones
    ascending by raw id. `kept` then filters ids and maps numbers to rows.

    Attributes:
        ids: raw ids by number, int64 or Arrow text; after `kept`, by row.
        numbers: number of every key of the scan, None where key k has number k.
        known: row in the extended store by number, -1 for new ids; None where no store is extended.
        final: row in the store by number, -1 where the id was filtered out; None before `kept`.
        vocabulary: of the extended store, if any.
    """

    ids: Any
    numbers: NDArray[np.int32] | None
    known: Int64Array | None = None
    final: NDArray[np.int32] | None = None
    vocabulary: Vocabulary | None = None

    @classmethod
    def of(cls, ids: KeyedIds, role: str, vocabulary: Vocabulary | None) -> IdRows:
        """Number the ids of the scan.

        Raises:
            UserError: the ids are text and those of the extended store are not.
        """
        texts = ids.texts
        if vocabulary is None:
            if texts is None:
                return cls(ids.distinct, None)
            order = pc.sort_indices(texts).to_numpy()
            return cls(texts.take(pa.array(order)), _inverse(order))
        if vocabulary.is_text != (texts is not None):
            raise UserError(f"{role} ids are {vocabulary.kind} in the store to be extended, but not in the log")
        order = np.arange(len(ids.distinct)) if texts is None else pc.sort_indices(texts).to_numpy().astype(np.int64)
        raw = ids.distinct if texts is None else texts.take(pa.array(order))
        known = vocabulary.encode(raw)
        by_number = np.argsort(np.where(known >= 0, known, len(vocabulary)), kind="stable")
        raw = raw[by_number] if texts is None else raw.take(pa.array(by_number))
        return cls(raw, _inverse(order[by_number]), known[by_number], None, vocabulary)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_known(self) -> int:
        return 0 if self.vocabulary is None else len(self.vocabulary)

    def index(self, ids: KeyedIds) -> KeyIndex:
        """Return the index from keys to numbers."""
        return KeyIndex(ids.distinct, self.numbers)

    def by_number(self, values: Int64Array) -> Int64Array:
        """Reorder `values` from keys of the scan to numbers."""
        if self.numbers is None:
            return values
        out = np.empty_like(values)
        out[self.numbers] = values
        return out

    @property
    def final_rows(self) -> NDArray[np.int32]:
        """Row in the store by number, -1 where the id was filtered out."""
        assert self.final is not None, "ids are filtered before they are written"
        return self.final

    def kept(self, keep: NDArray[np.bool_]) -> IdRows:
        """Assign rows: known ids keep theirs, also without events; new ids to be kept follow in order."""
        new = keep if self.known is None else keep & (self.known < 0)
        rows = np.cumsum(new, dtype=np.int32)
        rows += self.num_known - 1
        if self.known is not None:
            rows = np.where(new, rows, self.known).astype(np.int32)
        rows[~keep] = -1
        ids = self.ids
        if not new.all():
            ids = ids[new] if isinstance(ids, np.ndarray) else ids.filter(pa.array(new))
        if self.vocabulary is not None:
            old = self.vocabulary.ids
            ids = np.concatenate([old, ids]) if isinstance(ids, np.ndarray) else pa.concat_arrays([old, ids])
        return IdRows(ids, self.numbers, self.known, rows, self.vocabulary)

    def vocabulary_of_rows(self) -> Vocabulary:
        """Return the ids by row as a vocabulary; after `kept`."""
        ids = self.ids if isinstance(self.ids, np.ndarray) else self.ids.cast(pa.large_string())
        return Vocabulary(ids, self._order())

    def write(self, writer: StoreWriter, name: str) -> None:
        """Write the vocabulary, with the order that sorts it where old and new ids are mixed."""
        writer.write_vocabulary(name, self.ids, self._order())

    def _order(self) -> Int64Array | None:
        if self.vocabulary is None:
            return None
        texts = not isinstance(self.ids, np.ndarray)
        order = pc.sort_indices(self.ids).to_numpy().astype(np.int64) if texts else np.argsort(self.ids)
        return None if (np.diff(order) == 1).all() else order


def _inverse(order: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    inverse = np.empty(len(order), np.int32)
    inverse[order] = np.arange(len(order), dtype=np.int32)
    return inverse
