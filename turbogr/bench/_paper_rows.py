"""A row of the comparison with TurboGR's paper, and what a part of the comparison found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from turbogr.bench.record import Table
from turbogr.data.prepare.sources.event_generator import PRESETS, length_spread, scale_to_mean
from turbogr.data.vocabulary import Int64Array

Kind = Literal["measured", "emulated", "simulated"]

FILL = 0.496
"""How full the paper's sequences are: 1,064,960 indices of which 537,019 are padding."""

_KUAIRAND = PRESETS["kuairand-27k"]
_SPREAD = length_spread(_KUAIRAND["mean_length"], _KUAIRAND["median_length"])
_SHORTEST = 2

BATCH_SIZES = {"tiny": 15, "small": 8, "medium": 5, "large": 2, "long": 1}
"""Sequences per device: the paper's for FuXi, taken for HSTU too; it has none for `long`."""


@dataclass(frozen=True)
class Row:
    """A claim of the paper beside what we measure.

    Attributes:
        key: of the figure in the record.
        paper: the paper's figure; None where it has none of this kind.
        ours: our figure.
        better: which direction is better, or "same" where the quantity is to be reproduced.
        section: the part of the benchmark that repeats this row, with its `settings`.
    """

    key: str
    claim: str
    paper: float | None
    paper_conditions: str
    ours: float
    conditions: str
    better: Literal["higher", "lower", "same"]
    kind: Kind
    settings: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Ours ÷ the paper's."""
        return None if not self.paper else self.ours / self.paper

    @property
    def verdict(self) -> str:
        """Whether our figure reaches the paper's."""
        if self.paper is None:
            return "no figure in the paper"
        if self.better == "same":
            return "compared"
        reached = self.ours >= self.paper if self.better == "higher" else self.ours <= self.paper
        return "reached" if reached else "falls short"


@dataclass
class Part:
    """What one part of the comparison found."""

    rows: list[Row] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a row and its figure."""
        self.rows.append(row)
        self.figures[row.key] = row.ours


Measure = Callable[[Mapping[str, Any], Part], None]
"""Measures a part of the comparison with the benchmark's settings."""


def filled_lengths(num: int, longest: int, fill: float = FILL, seed: int = 0) -> Int64Array:
    """Return `num` lengths up to `longest` that are `fill` of it in the mean, with the spread of KuaiRand-27K."""
    raw = np.exp(_SPREAD * np.random.default_rng(seed).standard_normal(num))
    scale = scale_to_mean(raw, fill * longest, _SHORTEST, longest)
    lengths: Int64Array = np.clip(raw * scale, _SHORTEST, longest).astype(np.int64)
    return lengths


def as_table(rows: Sequence[Row]) -> Table:
    """Return the rows as they are printed."""
    columns = ["figure", "paper", "ours", "ours ÷ paper", "", "how"]
    cells = [[row.key, row.paper, row.ours, row.ratio, row.verdict, row.kind] for row in rows]
    return Table("The paper's claims and what we measure", columns, cells)
