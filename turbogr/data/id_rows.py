"""Which row of the store every raw id gets, with and without a store that is extended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turbogr.data.ids import KeyIndex
from turbogr.data.scan import Ids
from turbogr.data.store import StoreWriter
from turbogr.data.vocabulary import Int64Array, Vocabulary
from turbogr.errors import UserError


@dataclass
class IdRows:
    """Which row every id gets.

    While the log is sorted, an id's *rank* stands for it: known ids in the order of their rows, then new ones
    ascending by raw id. `final` maps a rank to its row in the store, -1 where it was filtered out.

    Attributes:
        ids: raw ids by rank, int64 or Arrow text; after `kept`, by row.
        rows_by_key: rank of every key of the scan.
        known: row in the extended store by rank, -1 for new ids.
        vocabulary: of the extended store, if any.
    """

    ids: Any
    rows_by_key: Int64Array
    known: Int64Array
    final: NDArray[np.int32]
    vocabulary: Vocabulary | None = None

    @classmethod
    def of(cls, ids: Ids, role: str, vocabulary: Vocabulary | None) -> IdRows:
        """Rank the ids of the scan.

        Raises:
            UserError: the ids are text and those of the extended store are not.
        """
        count = len(ids.keys)
        order = np.arange(count) if ids.texts is None else pc.sort_indices(ids.texts).to_numpy().astype(np.int64)
        raw = ids.keys if ids.texts is None else ids.texts.take(pa.array(order))
        known = np.full(count, -1, np.int64)
        if vocabulary is not None:
            if vocabulary.is_text != (ids.texts is not None):
                raise UserError(f"{role} ids are {vocabulary.kind} in the store to be extended, but not in the log")
            known = vocabulary.encode(raw)
            by_rank = np.argsort(np.where(known >= 0, known, len(vocabulary)), kind="stable")
            order, known = order[by_rank], known[by_rank]
            raw = raw[by_rank] if ids.texts is None else raw.take(pa.array(by_rank))
        ranks = np.empty(count, np.int64)
        ranks[order] = np.arange(count)
        return cls(raw, ranks, known, np.arange(count, dtype=np.int32), vocabulary)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_known(self) -> int:
        return 0 if self.vocabulary is None else len(self.vocabulary)

    def index(self, ids: Ids) -> KeyIndex:
        return KeyIndex(ids.keys, self.rows_by_key)

    def kept(self, keep: NDArray[np.bool_]) -> IdRows:
        """Give rows: known ids have theirs, kept new ids follow in order; known ids stay even without events."""
        new = keep & (self.known < 0)
        rows = np.where(new, self.num_known + np.cumsum(new) - 1, self.known)
        final = np.where(keep, rows, -1).astype(np.int32)
        ids = self.ids[new] if isinstance(self.ids, np.ndarray) else self.ids.filter(pa.array(new))
        if self.vocabulary is not None:
            old = self.vocabulary.ids
            ids = np.concatenate([old, ids]) if isinstance(ids, np.ndarray) else pa.concat_arrays([old, ids])
        return IdRows(ids, self.rows_by_key, self.known, final, self.vocabulary)

    def write(self, writer: StoreWriter, name: str) -> None:
        """Write the vocabulary, with the order that sorts it where old and new ids are mixed."""
        order = None
        if self.vocabulary is not None:
            texts = not isinstance(self.ids, np.ndarray)
            order = pc.sort_indices(self.ids).to_numpy().astype(np.int64) if texts else np.argsort(self.ids)
            if (np.diff(order) == 1).all():
                order = None
        writer.write_vocabulary(name, self.ids, order)
