"""Features of events, items and users, and the actions that a ranking model predicts, as a store keeps them.

A feature goes by its key: whose it is, a point, and its name, such as "event.tab", "item.author_id", "user.age" or
"action.is_click". The manifest has a `FeatureInfo` for every key, and the folder one column or several:

    category    a value of a vocabulary per row: int32 [n], -1 where none is given
    categories  any number of them per row: int32 [N] and `KEY.offsets` int64 [n + 1]
    number      float32 [n], NaN where none is given
    vector      float32 [n * size], a vector per row, NaN where none is given
    binary      an action that is 0 or 1, in the column of the action; actions of other numbers are of kind number

`KEY.values` is the vocabulary of categories. Value v is row v + 1 of an embedding table; row 0 stands for a value
that is not given. `turbogr.data.feature_values` makes the tensors of a batch from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turbogr.data.ranges import concatenated_ranges
from turbogr.data.vocabulary import Int64Array, Vocabulary

Kind = Literal["category", "categories", "number", "vector", "binary"]

OWNERS = ("event", "item", "user")
_LARGEST_NUMBER = 5.0  # standard deviations; a single odd value must not decide a prediction


@dataclass(frozen=True)
class FeatureInfo:
    """What the manifest says of a feature.

    `size` is the number of values of a vocabulary, or the width of a vector. `missing` counts rows without a value.
    `low` and `high` are the range of numbers. `mean` and `std` are of log(1 + x) where `log` is set, which is so for
    numbers from 0 on that are far from symmetric. The mean of a binary action is the rate of its positives.
    """

    kind: Kind
    size: int = 1
    missing: int = 0
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 0.0
    log: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of an embedding table for the values of a category: one for each, and one for missing ones."""
        assert self.kind in ("category", "categories"), self.kind
        return self.size + 1

    @property
    def width(self) -> int:
        """Floats per row in a batch, of numbers and vectors."""
        assert self.kind in ("number", "vector"), self.kind
        return 2 if self.kind == "number" else self.size


@dataclass(frozen=True)
class FeatureColumn:
    """A feature of a store: `values` and `offsets` as the module says, `vocabulary` of categories."""

    key: str
    info: FeatureInfo
    values: NDArray[Any]
    offsets: Int64Array | None = None
    vocabulary: Vocabulary | None = None

    @property
    def owner(self) -> str:
        """ "event", "item", "user" or "action"."""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        return self.key.partition(".")[2]

    def table_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of a feature's table for the category of every event, item or user; row -1 has none."""
        rows, known = _within(rows)
        return np.where(known, self.values[rows], -1).astype(np.int64) + 1

    def table_row_lists(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows of the table for the categories of every event, item or user, and how many each has."""
        assert self.offsets is not None
        rows, known = _within(rows)
        starts = np.asarray(self.offsets[rows])
        lengths = np.where(known, np.asarray(self.offsets[rows + 1]) - starts, 0)
        return np.asarray(self.values[concatenated_ranges(starts, lengths)]).astype(np.int64) + 1, lengths

    def floats(self, rows: Int64Array) -> NDArray[np.float32]:
        """Return what a model sees of numbers and vectors, float32 [n, `info.width`]; row -1 has none.

        A number is two floats: standard deviations from the mean (of log(1 + x) where the feature says so), and 1 where
        none is given, whose first float is 0. A vector that is not given is 0.
        """
        rows, known = _within(rows)
        info = self.info
        if info.kind == "vector":
            vectors = np.array(self.values.reshape(-1, info.size)[rows], np.float32)
            vectors[~known | np.isnan(vectors).any(1)] = 0
            return vectors
        values = np.where(known, self.values[rows], np.nan)
        missing = np.isnan(values)
        x = np.log1p(np.maximum(values, 0)) if info.log else values
        standard = np.clip((x - info.mean) / (info.std or 1.0), -_LARGEST_NUMBER, _LARGEST_NUMBER)
        return np.stack([np.where(missing, 0, standard), missing], 1).astype(np.float32)


def _within(rows: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Return rows that can be read, 0 in the place of -1, and which are not -1."""
    known = rows >= 0
    return (rows if known.all() else np.where(known, rows, 0)), known
