"""How long a training step takes on N ranks, from what was measured on one rank and between two: pure arithmetic.

A step on one rank is its computing (forward, backward), fetching and updating. N ranks compute the same each and wait
for the slowest; what comes on top is what `turbogr/parallel` sends and sums, counted in bytes and messages here, over
links of known latency and rate, and the passes over memory that this takes. Nothing is fitted to a run of many ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from turbogr.parallel.dense import bucket_bytes_for

_FLOAT, _ID = 4, 8


@dataclass(frozen=True)
class Work:
    """One rank's part of a step: `num_ids` item look-ups (duplicates count) in a table of `num_items` rows of `dim`."""

    num_ids: int
    num_items: int
    dim: int
    num_parameters: int

    def distinct(self, ranks: float = 1.0) -> float:
        """Rows that `ranks` ranks touch together, when look-ups are spread evenly over the table."""
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
    """`latency` seconds that a message to one other rank takes, or one round of a sum over two; `rate` bytes a second
    for each rank that uses it at the same time.
    """

    latency: float
    rate: float

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        return messages * self.latency + num_bytes / self.rate


@dataclass(frozen=True)
class Cluster:
    """`inside` joins the members of a group, `across` the groups, and `ring` sums over all ranks."""

    groups: int
    members: int
    inside: Link
    across: Link
    ring: Link

    @property
    def size(self) -> int:
        return self.groups * self.members


def step_seconds(work: Work, one: OneRank, cluster: Cluster, *, waiting: float = 0.0) -> float:
    """Predict the seconds of a step; `waiting` is the share of the time that ranks wait because parts are unequal."""
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
    """Bytes a second of a pass over rows, as the update of one rank shows it."""
    return _update_bytes(work.num_parameters, work.distinct() * work.dim) / one.update


def _update_bytes(dense: float, rows: float) -> float:
    """AdamW reads four and writes three numbers for a dense parameter, Adagrad three and two for one of a row."""
    return _FLOAT * (7 * dense + 5 * rows)


def _update(work: Work, one: OneRank, cluster: Cluster) -> float:
    """A rank updates all dense parameters and the touched rows of its shard."""
    rows = work.distinct(cluster.size) / cluster.members
    return _update_bytes(work.num_parameters, rows * work.dim) / _memory_rate(work, one)


def _exchange(work: Work, one: OneRank, cluster: Cluster) -> float:
    """Inside a group: counts, ids and vectors, then gradients; and what gathering and summing rows costs."""
    if cluster.members == 1:
        return 0.0
    rows, others = work.distinct(), (cluster.members - 1) / cluster.members
    sent = rows * others * (_ID + 2 * work.row_bytes)
    passes = 5 * rows * work.row_bytes  # look up, and add what came to the sums
    messages = 4 * (cluster.members - 1)
    return cluster.inside.seconds(sent, messages) + passes / _memory_rate(work, one)


def _across(work: Work, cluster: Cluster) -> float:
    """Between groups: pairs of the touched rows of a shard to those who sum them, and the sums to all."""
    if cluster.groups == 1:
        return 0.0
    others = (cluster.groups - 1) / cluster.groups
    pair = _ID + work.row_bytes
    touched = work.distinct(cluster.members) / cluster.members
    summed = work.distinct(cluster.size) / cluster.members
    return cluster.across.seconds((touched + summed) * others * pair, messages=6 * (cluster.groups - 1))


def _dense(work: Work, cluster: Cluster) -> float:
    """The sum of the dense gradients over all ranks, as a ring sends every bucket, and the agreement on loss and norm.

    A ring of N ranks takes N - 1 times as many rounds as one of two.
    """
    num_bytes = work.num_parameters * _FLOAT
    sums = math.ceil(num_bytes / bucket_bytes_for(cluster.size)) + 1
    sent = 2 * (cluster.size - 1) / cluster.size * num_bytes
    return cluster.ring.seconds(sent, messages=sums * (cluster.size - 1))
