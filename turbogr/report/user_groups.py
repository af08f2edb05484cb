"""Metrics by kinds of users: thirds of the users by the popularity of the held-out item and by the history's length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbogr.evaluation.metrics import margin, paired_difference, standard_errors, user_values
from turbogr.evaluation.user_positions import UserPositions


@dataclass(frozen=True)
class UserGroup:
    """Some users: those whose value lies from `low` to `high`, both included; `chosen` [n] marks them."""

    low: int
    high: int
    chosen: NDArray[np.bool_]

    @property
    def num_users(self) -> int:
        return int(self.chosen.sum())


def thirds(values: NDArray[np.int64]) -> list[UserGroup]:
    """Cut users into three groups of about equal size by their `values` [n], lowest first.

    Users of equal value stay together, so groups may differ in size, and there may be fewer than three.
    """
    bounds = np.quantile(values, [1 / 3, 2 / 3, 1], method="inverted_cdf")
    groups = []
    below = -1
    for bound in bounds.tolist():
        chosen = (values > below) & (values <= bound)
        if chosen.any():
            groups.append(UserGroup(int(values[chosen].min()), int(values[chosen].max()), chosen))
        below = bound
    return groups


@dataclass(frozen=True)
class GroupScore:
    """A metric of one system in one group, with the margin of its 95 % confidence interval."""

    value: float
    margin: float


def group_score(by_user: UserPositions, group: UserGroup, system: str, metric: str) -> GroupScore:
    """Measure a system on the users of a group.

    Raises:
        ValueError: a metric without a value per user.
    """
    positions = by_user.positions[system][group.chosen]
    value = float(user_values(positions, metric).mean())
    error = standard_errors(positions, [metric]).get(metric)
    return GroupScore(value, math.nan if error is None else margin(error, len(positions)))


def group_difference(by_user: UserPositions, group: UserGroup, system: str, metric: str) -> GroupScore:
    """Return how much better what the run delivers is than a system on the users of a group, user by user."""
    ours, theirs = (by_user.positions[name][group.chosen] for name in (by_user.main, system))
    value, error = paired_difference(ours, theirs, metric)
    if value == 0 and error == 0:
        return GroupScore(0.0, 0.0)
    return GroupScore(value, margin(error, len(ours)) if math.isfinite(error) else math.nan)
