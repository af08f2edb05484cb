"""What a store holds, in numbers: lengths, popularity, times; computed block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbogr.data.repeats import Repeats, count_repeats
from turbogr.data.split import Split, time_range
from turbogr.data.store import Store, read_range
from turbogr.data.times import END_OF_TIME
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError

_TIME_BINS = 60
_TOP_ITEMS = 5


@dataclass(frozen=True)
class Distribution:
    """Counts per user or per item: mean, quantiles, and a histogram whose bins double in width.

    `bins` are (first, last, how many) with both ends included; the first bin is 0 where ids without events exist.
    """

    mean: float
    median: int
    p90: int
    p99: int
    largest: int
    bins: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, counts: NDArray[np.integer]) -> Distribution:
        median, p90, p99 = np.quantile(counts, [0.5, 0.9, 0.99], method="inverted_cdf").tolist()
        exponents = np.zeros(len(counts), np.int64)
        some = counts > 0
        exponents[some] = np.floor(np.log2(counts[some])).astype(np.int64) + 1
        occupied = np.bincount(exponents)
        first = int(np.flatnonzero(occupied)[0])
        bins = tuple(
            (0, 0, int(number)) if exponent == 0 else (1 << (exponent - 1), (1 << exponent) - 1, int(number))
            for exponent, number in enumerate(occupied.tolist())
            if exponent >= first
        )
        return cls(float(counts.mean()), int(median), int(p90), int(p99), int(counts.max()), bins)


@dataclass(frozen=True)
class Summary:
    """`top_shares` maps a share of the items (the most popular) to their share of the events; `top_items` are the raw
    ids and events of the most popular items; `over_time` counts the events in equal spans between
    `first_time` and `last_time` (None where the store has no real times); `repeats` counts held-out items that their
    users have had before."""

    lengths: Distribution
    popularity: Distribution
    top_shares: dict[str, float]
    top_items: tuple[tuple[int | str, int], ...]
    first_time: int | None
    last_time: int | None
    over_time: tuple[int, ...]
    repeats: Repeats | None


def summarise(store: Store) -> Summary:
    """Read the whole store once.

    Raises:
        UserError: a column holds what `prepare` never writes.
    """
    if (store.lengths < 0).any():
        raise UserError(f"{store.path / 'offsets.npy'} does not ascend; prepare the store again")
    popularity = store.item_counts()
    descending = np.sort(popularity)[::-1]
    shares = {
        f"{share:.0%}": float(descending[: max(1, round(share * len(descending)))].sum() / max(store.num_events, 1))
        for share in (0.01, 0.1, 0.5)
    }
    first = last = None
    over_time: Int64Array = np.zeros(0, np.int64)
    if store.manifest.times == "real":
        first, last = time_range(store)
        if first < 0 or last > END_OF_TIME:
            raise UserError(f"{store.path / 'times.npy'} holds times outside 1970 to 2200; prepare the store again")
        over_time = _events_over_time(store, first, last)
    return Summary(
        lengths=Distribution.of(store.lengths),
        popularity=Distribution.of(popularity),
        top_shares=shares,
        top_items=_top_items(store, popularity),
        first_time=first,
        last_time=last,
        over_time=tuple(over_time.tolist()),
        repeats=count_repeats(store, Split.of(store)),
    )


def _top_items(store: Store, counts: Int64Array) -> tuple[tuple[int | str, int], ...]:
    rows = np.argsort(-counts, kind="stable")[:_TOP_ITEMS]
    return tuple(zip(store.item_ids.decode(rows).tolist(), counts[rows].tolist(), strict=True))


def _events_over_time(store: Store, first: int, last: int) -> Int64Array:
    counts = np.zeros(_TIME_BINS, np.int64)
    span = last - first + 1
    for block_first, block_last in store.user_blocks():
        times = read_range(store.times, int(store.offsets[block_first]), int(store.offsets[block_last]))
        counts += np.bincount((times - first) * _TIME_BINS // span, minlength=_TIME_BINS)
    return counts
