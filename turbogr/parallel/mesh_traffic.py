"""Which mesh moves a step's rows fastest: predicted from how many distinct rows batches have, and from measured links.

Flat, one table over all ranks, sends every rank's rows and their gradients over the network. Hierarchical, a table per
machine, keeps that inside the machine and sends the summed gradients of the machine's rows between machines instead. It
pays where the ranks of a machine have many rows in common, and costs where they have few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ID_BYTES = 8


@dataclass(frozen=True)
class RowTraffic:
    """Distinct rows of a step, means: of one rank, of the ranks of a machine together, of all ranks together."""

    of_rank: float
    of_machine: float
    of_all: float

    @classmethod
    def of_steps(cls, steps: Sequence[Sequence[NDArray[np.integer]]], per_machine: int) -> RowTraffic:
        """Count in steps of [ids of every rank]; consecutive ranks share a machine."""
        ranks, machines, whole = [], [], []
        for step in steps:
            ranks += [len(np.unique(ids)) for ids in step]
            for first in range(0, len(step), per_machine):
                machines.append(len(np.unique(np.concatenate(step[first : first + per_machine]))))
            whole.append(len(np.unique(np.concatenate(step))))
        return cls(float(np.mean(ranks)), float(np.mean(machines)), float(np.mean(whole)))


@dataclass(frozen=True)
class MeasuredLink:
    """Seconds of an exchange that sends nothing, and bytes per second that each rank sends to others."""

    latency: float
    rate: float

    def seconds(self, sent: float) -> float:
        return self.latency + sent / self.rate


@dataclass(frozen=True)
class MeasuredLinks:
    """`everywhere`: exchanges between all ranks; `inside`: of a machine; `across`: one rank of every machine."""

    everywhere: MeasuredLink
    inside: MeasuredLink
    across: MeasuredLink


def predicted_seconds(
    traffic: RowTraffic, links: MeasuredLinks, row_bytes: int, machines: int, per_machine: int
) -> tuple[float, float]:
    """Return the seconds that rows and gradients of a step take on a flat mesh and on one with a group per machine."""
    size = machines * per_machine

    def exchanged(members: int) -> float:
        """Bytes that a rank sends for the ids and vectors that it asks for, and the gradients that it returns."""
        return traffic.of_rank * (members - 1) / members * (_ID_BYTES + 2 * row_bytes)

    flat = 2 * links.everywhere.latency + links.everywhere.seconds(exchanged(size))
    # A rank sends its part of its machine's gradients to those that sum them, and gets every row's sum.
    summed = (traffic.of_machine + traffic.of_all) / per_machine * (machines - 1) / machines * (_ID_BYTES + row_bytes)
    hierarchical = links.across.latency + links.across.seconds(summed)
    if per_machine > 1:
        hierarchical += 2 * links.inside.latency + links.inside.seconds(exchanged(per_machine))
    return flat, hierarchical


def choose_groups(
    traffic: RowTraffic, links: MeasuredLinks, row_bytes: int, machines: int, per_machine: int
) -> tuple[int, str]:
    """Return the number of groups whose predicted traffic is faster, 1 or one per machine, and why."""
    flat, hierarchical = predicted_seconds(traffic, links, row_bytes, machines, per_machine)
    groups = 1 if flat <= hierarchical else machines
    what = "one table for all ranks" if groups == 1 else "a table per machine"
    common = traffic.of_machine / (per_machine * traffic.of_rank)
    return groups, (
        f"{what}: {1e3 * flat:.3g} ms with one table, {1e3 * hierarchical:.3g} ms with one per machine; the ranks of a "
        f"machine have {traffic.of_machine:,.0f} distinct rows in a step, {100 * common:.0f} % of the sum of theirs"
    )
