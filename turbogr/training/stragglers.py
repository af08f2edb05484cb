"""Ranks that are slower than planned, and what the others lose by waiting for them.

In the exchange that every step ends with, each rank tells how long its own work of the step before took, without any
waiting, and what the plan says that it costs. That is all that is measured. A rank counts as slow if in three quarters
of the steps it takes a tenth longer than the plan allows, in each of three windows of 20 steps and ten seconds or more.
So neither single slow steps nor short disturbances are reported, nor a rank that has more to do by plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.cost import Float64Array

_STEPS, _SECONDS, _WINDOWS = 20, 10.0, 3
_TOLERATED, _NOTICED = 1.1, 1.15
_CHANGED = 1.25


@dataclass(frozen=True)
class SlowRank:
    """How many times as long as planned a rank takes, its share of all the time that ranks wait for each other, and
    how much of a step it costs."""

    rank: int
    host: str
    slowdown: float
    share_of_waiting: float
    share_of_step: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} takes {self.slowdown:.2g} times as long as planned: "
            f"{self.share_of_waiting:.0%} of the time that ranks wait for each other is for it, and steps would be "
            f"{self.share_of_step:.0%} shorter without"
        )


@dataclass(frozen=True)
class StragglerReport:
    """The slow ranks of a run at a step, none if they have caught up, and speeds that would let all end together."""

    slow: tuple[SlowRank, ...] = ()
    speeds: tuple[float, ...] = ()
    balances: bool = True

    def __str__(self) -> str:
        if not self.slow:
            return "no rank is slower than planned any more"
        speeds = ",".join(f"{speed:g}" for speed in self.speeds)
        remedy = f"--set parallel.speeds=[{speeds}]{'' if self.balances else ' --set parallel.balance=auto'}"
        return (
            f"{'; '.join(map(str, self.slow))}. Look at that machine; if it stays so, stop, and resume with {remedy} "
            "to give it less to do"
        )

    def to_record(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl."""
        ranks = [
            {
                "rank": slow.rank,
                "host": slow.host,
                "slowdown": round(slow.slowdown, 3),
                "share_of_waiting": round(slow.share_of_waiting, 3),
                "share_of_step": round(slow.share_of_step, 3),
            }
            for slow in self.slow
        ]
        return {"ranks": ranks, "speeds": list(self.speeds)}


def describe_stragglers(record: Mapping[str, Any]) -> str:
    """Return a sentence about a record that `to_record` has made, "" for one that is damaged."""
    try:
        slow = [
            f"rank {rank['rank']} took {rank['slowdown']:.2g} times as long as planned "
            f"({rank['share_of_waiting']:.0%} of the ranks' waiting for each other)"
            for rank in record["ranks"]
        ]
        since = f"Since step {record['step']:,}"
    except (KeyError, TypeError, ValueError):
        return ""
    return f"{since} {'; '.join(slow) or 'no rank was slower than planned'}."


@dataclass
class _Window:
    """What is measured of some steps: seconds and planned cost ÷ speed, [steps][ranks]."""

    seconds: list[Float64Array] = field(default_factory=list)
    planned: list[Float64Array] = field(default_factory=list)
    length: float = 0.0


class StragglerWatch:
    """Finds slow ranks from the loads of every step. `speeds` are those that the plan counts with."""

    def __init__(self, hosts: Sequence[str], speeds: Sequence[float], *, balances: bool) -> None:
        self.hosts, self.balances = tuple(hosts), balances
        self.speeds: Float64Array = np.asarray(speeds, np.float64)
        self._window = _Window()
        self._last: deque[tuple[Float64Array, Float64Array, NDArray[np.bool_]]] = deque(maxlen=_WINDOWS)
        """Of the last windows: slowdowns and seconds, both [steps, ranks], and which ranks are slow [ranks]."""
        self._reported: dict[int, float] = {}

    def add(self, loads: NDArray[Any]) -> StragglerReport | None:
        """Add a step's `loads`, seconds and planned cost by rank [ranks, 2]; return a report if something has changed.

        A step that has not been measured has no seconds and does not count.
        """
        seconds, costs = loads[:, 0], loads[:, 1]
        if len(seconds) < 2 or not seconds.min() > 0:
            return None
        window = self._window
        window.seconds.append(seconds)
        window.planned.append(costs / self.speeds)
        window.length += float(seconds.max())
        if len(window.seconds) < _STEPS or window.length < _SECONDS:
            return None
        self._window = _Window()
        measured = np.stack(window.seconds)
        slowdowns = _slowdowns(measured, np.stack(window.planned))
        slow = (np.quantile(slowdowns, 0.25, axis=0) > _TOLERATED) & (np.median(slowdowns, axis=0) > _NOTICED)
        self._last.append((slowdowns, measured, slow))
        return self._judge() if len(self._last) == _WINDOWS else None

    def _judge(self) -> StragglerReport | None:
        slow = np.stack([found for _, _, found in self._last])
        median = np.median(np.concatenate([slowdowns for slowdowns, _, _ in self._last]), axis=0)
        now = {rank: value for rank, value in self._reported.items() if slow[:, rank].any()}  # perhaps catching up
        now |= {rank: float(median[rank]) for rank in range(len(self.hosts)) if slow[:, rank].all()}
        if now.keys() == self._reported.keys() and all(
            1 / _CHANGED < value / self._reported[rank] < _CHANGED for rank, value in now.items()
        ):
            return None
        self._reported = now
        return self._report(now)

    def _report(self, slow: dict[int, float]) -> StragglerReport:
        if not slow:
            return StragglerReport(balances=self.balances)
        seconds = np.concatenate([measured for _, measured, _ in self._last])
        slowest, longest = seconds.argmax(axis=1), seconds.max(axis=1)
        waiting = (longest[:, None] - seconds).sum(axis=1)
        others = np.partition(seconds, -2, axis=1)[:, -2]
        found = []
        for rank, slowdown in slow.items():
            for_it = slowest == rank
            share = float(waiting[for_it].sum() / max(waiting.sum(), 1e-12))
            of_step = float((longest - others)[for_it].sum() / longest.sum())
            found.append(SlowRank(rank, self.hosts[rank], slowdown, share, of_step))
        speeds = self.speeds.copy()
        for rank, slowdown in slow.items():
            speeds[rank] /= slowdown
        speeds /= speeds.max()
        return StragglerReport(tuple(found), tuple(round(float(speed), 2) for speed in speeds), self.balances)


def _slowdowns(seconds: Float64Array, planned: Float64Array) -> Float64Array:
    """Return how many times as long as planned every rank has taken, [steps, ranks].

    The measure of a step is the rank that is in the middle, of two the faster one. A rank that has more to do than that
    one may take longer by as much; one that has less to do may take as long, because a step has a fixed part.
    """
    ranks = np.arange(len(seconds))
    middle = np.argsort(seconds, axis=1, kind="stable")[:, (seconds.shape[1] - 1) // 2]
    more = planned / np.maximum(planned[ranks, middle], 1e-12)[:, None]
    return seconds / seconds[ranks, middle][:, None] / np.maximum(more, 1.0)  # type: ignore[no-any-return]
