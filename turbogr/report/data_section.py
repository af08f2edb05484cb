"""The section about the data: lengths of users' histories and popularity of items."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.errors import UserError
from turbogr.plot import Axis, Mark, Series, histogram, line_chart, si
from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.section import Figure, Section

_NUM_BINS = 24
_NUM_POINTS = 120


@dataclass(frozen=True)
class Lengths:
    """Events per user: a histogram over logarithmic bins, the mean, the median and the longest."""

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
    """Events per item, most popular first, at logarithmic steps of the position; and the share of the most popular."""

    positions: list[int]
    counts: list[int]
    head_share: float
    head_items: int
    unused: int

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> Popularity:
        """Summarise `counts` [V], V ≥ 1; the head is the most popular hundredth of the items."""
        ordered = np.sort(counts)[::-1]
        used = max(int(np.count_nonzero(ordered)), 1)
        positions = np.unique(np.geomspace(1, used, _NUM_POINTS).round().astype(np.int64))
        head = max(1, len(ordered) // 100)
        share = float(ordered[:head].sum() / max(int(ordered.sum()), 1))
        unused = len(ordered) - int(np.count_nonzero(ordered))
        return cls(positions.tolist(), ordered[positions - 1].tolist(), share, head, unused)


def data(run: RunData) -> Section:
    """Lengths of histories and popularity of items, read from the store if it still exists."""
    context: dict[str, Any] = {"figures": [], "sentences": [], "missing": ""}
    try:
        store = run.store
    except UserError as error:
        context["missing"] = f"The distributions cannot be shown: {error}"
        return Section("data", "Data", "data.html", context)
    lengths, popularity = Lengths.of(store.lengths), Popularity.of(store.item_counts())
    context["figures"] = [_lengths_figure(run, lengths), _popularity_figure(popularity)]
    context["sentences"] = _sentences(lengths, popularity)
    return Section("data", "Data", "data.html", context)


def _lengths_figure(run: RunData, lengths: Lengths) -> Figure:
    marks = [Mark(lengths.median, 0, f"median {si(lengths.median)}")]
    limit = wording.number(run.setting("model", "max_len"))
    caption = ""
    if math.isfinite(limit) and limit < lengths.longest:
        caption = f"The model reads the last {wording.count(limit)} events of a history."
    names = [_whole_range(low, high) for low, high in pairwise(lengths.edges)]

    def draw(width: float) -> str:
        return histogram(
            lengths.edges,
            lengths.counts,
            title="Length of a user's history",
            x=Axis("events", log=True),
            y=Axis("users", zero=True),
            names=names,
            marks=marks,
            width=width,
        )

    return Figure.draw(draw, caption)


def _whole_range(low: float, high: float) -> str:
    first, last = math.ceil(low), math.floor(high)
    return f"{first:,} events" if first == last else f"{first:,} to {last:,} events"


def _popularity_figure(popularity: Popularity) -> Figure:
    curve = Series("events", popularity.positions, popularity.counts)

    def draw(width: float) -> str:
        x = Axis("position of the item, most popular first", log=True)
        return line_chart(
            [curve], title="Popularity of items", x=x, y=Axis("events", log=True), width=width, height=260
        )

    return Figure.draw(draw)


def _sentences(lengths: Lengths, popularity: Popularity) -> list[str]:
    head = (
        "the most popular item has"
        if popularity.head_items == 1
        else (f"the most popular 1 % of the items ({wording.count(popularity.head_items)}) have")
    )
    sentences = [
        f"Half of the users have at most {wording.count(lengths.median)} events, the mean is {lengths.mean:,.1f} and "
        f"the longest history has {wording.count(lengths.longest)}.",
        f"Of all events, {head} {wording.share(popularity.head_share)}.",
    ]
    if popularity.unused:
        sentences.append(f"{wording.count(popularity.unused)} items of the vocabulary occur in no event.")
    return sentences


def _whole_edges(shortest: int, longest: int) -> NDArray[np.float64]:
    """Return ascending bin edges at half-integers, so that no length lies on one, spaced by a constant factor."""
    edges = np.geomspace(shortest, longest + 1, _NUM_BINS + 1)
    whole = np.unique(np.floor(edges))
    whole[0], whole[-1] = shortest, longest + 1
    return np.unique(whole) - 0.5
