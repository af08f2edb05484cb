"""How long users' histories are and how unevenly items are liked, as the few hundred points that a chart can show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbogr.data.store import Store

_NUM_BINS = 24
_NUM_POINTS = 120


@dataclass(frozen=True)
class Lengths:
    """Events per user: a histogram over logarithmic bins, and the figures that people ask for."""

    edges: list[float]
    counts: list[int]
    mean: float
    median: float
    longest: int

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> Lengths:
        """Summarise `lengths` [U], U ≥ 1."""
        longest = int(lengths.max())
        edges = _whole_edges(max(int(lengths.min()), 1), longest)
        counts, _ = np.histogram(lengths, bins=edges)
        return cls(edges.tolist(), counts.tolist(), float(lengths.mean()), float(np.median(lengths)), longest)


@dataclass(frozen=True)
class Popularity:
    """Events per item by rank, most popular first, at logarithmic steps; and how much the head takes."""

    ranks: list[int]
    counts: list[int]
    head_share: float
    head_items: int
    unused: int

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> Popularity:
        """Summarise `counts` [V], V ≥ 1; the head is the most popular hundredth of the items."""
        ordered = np.sort(counts)[::-1]
        used = max(int(np.count_nonzero(ordered)), 1)
        places = np.unique(np.geomspace(1, used, _NUM_POINTS).round().astype(np.int64))
        head = max(1, len(ordered) // 100)
        share = float(ordered[:head].sum() / max(int(ordered.sum()), 1))
        unused = len(ordered) - int(np.count_nonzero(ordered))
        return cls(places.tolist(), ordered[places - 1].tolist(), share, head, unused)


def distributions(store: Store) -> tuple[Lengths, Popularity]:
    """Read both from a store, one block of events at a time."""
    return Lengths.of(store.lengths), Popularity.of(store.item_counts())


def _whole_edges(shortest: int, longest: int) -> NDArray[np.float64]:
    """Return ascending bin edges at half-integers, so that no length lies on one, spaced by a constant factor."""
    edges = np.geomspace(shortest, longest + 1, _NUM_BINS + 1)
    whole = np.unique(np.floor(edges))
    whole[0], whole[-1] = shortest, longest + 1
    return np.unique(whole) - 0.5
