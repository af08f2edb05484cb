"""Predict the time of a training step on N ranks from measurements on one rank and between two: pure arithmetic.

A step on one rank is fetching, computing (forward, backward) and updating. Each of N ranks computes the same and waits
for the slowest. Added to that is what `turbogr/parallel` sends and sums, counted here in bytes and messages over links
of known latency and rate, and the passes over memory for it. Nothing is fitted to a run of many ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from turbogr.parallel.dense_gradients import bucket_bytes_for

_FLOAT, _ID = 4, 8


@dataclass(frozen=True)
class Work:
    """One rank's part of a step: `num_ids` look-ups (with duplicates) in a table of `num_items` rows of `dim`."""

    num_ids: int
    num_items: int
    dim: int
    num_parameters: int

    def distinct(self, ranks: float = 1.0) -> float:
        """Return the number of distinct rows that `ranks` ranks touch, if look-ups are uniform over the table."""
        return self.num_items * -math.expm1(self.num_ids * ranks * math.log1p(-1.0 / self.num_items))

    @property
    def row_bytes(self) -> int:
        return self.dim * _FLOAT


@dataclass(frozen=True)
class OneRank:
    """Seconds of the stages of a step on one rank."""

    fetch: float
    compute: float
    update: float

    @property
    def seconds(self) -> float:
        return self.fetch + self.compute + self.update


@dataclass(frozen=True)
class Link:
    """`latency`: seconds of a message to another rank, or of one round of a sum. `rate`: bytes per second for each rank
    that uses the link at the same time.
    """

    latency: float
    rate: float

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        return messages * self.latency + num_bytes / self.rate


@dataclass(frozen=True)
class Cluster:
    """`inside`: link between the members of a group. `across`: between groups. `ring`: for sums over all ranks."""

    groups: int
    members: int
    inside: Link
    across: Link
    ring: Link

    @property
    def size(self) -> int:
        return self.groups * self.members


def step_seconds(work: Work, one: OneRank, cluster: Cluster, *, waiting: float = 0.0) -> float:
    """Return the predicted seconds of a step; `waiting` is the share of time that ranks wait because of imbalance."""
    if cluster.size == 1:
        return one.seconds
    return (
        one.compute / (1.0 - waiting)
        + one.fetch
        + _update(work, one, cluster)
        + _exchange(work, one, cluster)
        + _across(work, cluster)
        + _dense(work, cluster)
    )


def _memory_rate(work: Work, one: OneRank) -> float:
    """Return the bytes per second of a pass over rows, derived from the update of one rank."""
    return _update_bytes(work.num_parameters, work.distinct() * work.dim) / one.update


def _update_bytes(dense: float, rows: float) -> float:
    """AdamW reads four and writes three numbers per dense parameter, Adagrad three and two per element of a row."""
    return _FLOAT * (7 * dense + 5 * rows)


def _update(work: Work, one: OneRank, cluster: Cluster) -> float:
    """A rank updates all dense parameters and the touched rows of its shard."""
    rows = work.distinct(cluster.size) / cluster.members
    return _update_bytes(work.num_parameters, rows * work.dim) / _memory_rate(work, one)


def _exchange(work: Work, one: OneRank, cluster: Cluster) -> float:
    """Inside a group: counts, ids and vectors, then gradients; and the cost of gathering and summing rows."""
    if cluster.members == 1:
        return 0.0
    rows, others = work.distinct(), (cluster.members - 1) / cluster.members
    sent = rows * others * (_ID + 2 * work.row_bytes)
    passes = 5 * rows * work.row_bytes  # look up, and add the received gradients to the sums
    messages = 4 * (cluster.members - 1)
    return cluster.inside.seconds(sent, messages) + passes / _memory_rate(work, one)


def _across(work: Work, cluster: Cluster) -> float:
    """Between groups: (slot, gradient) pairs of the touched rows to the ranks that sum them, and the sums to all."""
    if cluster.groups == 1:
        return 0.0
    others = (cluster.groups - 1) / cluster.groups
    pair = _ID + work.row_bytes
    touched = work.distinct(cluster.members) / cluster.members
    summed = work.distinct(cluster.size) / cluster.members
    return cluster.across.seconds((touched + summed) * others * pair, messages=6 * (cluster.groups - 1))


def _dense(work: Work, cluster: Cluster) -> float:
    """Sum of the dense gradients over all ranks, each bucket in a ring, and the agreement on loss and norm.

    A ring of N ranks takes N - 1 times as many rounds as one of two.
    """
    num_bytes = work.num_parameters * _FLOAT
    sums = math.ceil(num_bytes / bucket_bytes_for(cluster.size)) + 1
    sent = 2 * (cluster.size - 1) / cluster.size * num_bytes
    return cluster.ring.seconds(sent, messages=sums * (cluster.size - 1))
