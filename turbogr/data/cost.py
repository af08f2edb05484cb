"""What a sequence costs to train on: a·length + b·length², linear layers and attention.

Any unit will do (seconds when measured, FLOPs when counted), because balancing only compares costs. All ranks must plan
with the same two numbers, so when they are measured, one rank measures and sends them to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.vocabulary import Int64Array

Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of n tokens is a·n + b·n²; a step costs the sum over its sequences plus `fixed`.

    The default counts tokens.

    Raises:
        ValueError: a coefficient that is negative or not finite, or a and b both zero.
    """

    a: float = 1.0
    b: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) and x >= 0 for x in (self.a, self.b, self.fixed)) or self.a + self.b == 0:
            raise ValueError(
                f"a cost needs finite a, b and fixed >= 0, not both a and b zero, got {self.a}, {self.b}, {self.fixed}"
            )

    def cost(self, lengths: NDArray[Any]) -> Float64Array:
        """Return the cost of sequences of `lengths` [n], as float64 [n]."""
        n = np.asarray(lengths, np.float64)
        return self.a * n + self.b * (n * n)

    def step_cost(self, lengths: NDArray[Any]) -> float:
        """Return the cost of one step on sequences of `lengths` [n]."""
        return self.fixed + float(self.cost(lengths).sum())

    def whole_costs(self, lengths: Int64Array) -> Int64Array:
        """Return costs as whole numbers of at most 2^32, in proportion to `cost`.

        Sums of whole numbers are exact, so every machine builds the same plan whatever its instruction set.
        """
        costs = self.cost(lengths)
        top = costs.max(initial=0.0)
        if top <= 0:
            return np.zeros(len(costs), np.int64)
        whole: Int64Array = np.rint(costs * (2.0**32 / top)).astype(np.int64)
        return whole


def calibrate(measured: Sequence[tuple[NDArray[Any], float]]) -> CostModel:
    """Fit a cost model to steps given as (lengths of the step's sequences, seconds).

    Least squares of the relative error with non-negative a, b and fixed. Every set of positive coefficients is tried,
    which is exact; three coefficients have few such sets.

    Raises:
        ValueError: fewer than two steps with tokens, or a time that is not positive.
    """
    rows = [
        (1.0, float(np.sum(lengths)), float(np.sum(np.square(np.asarray(lengths, np.float64)))))
        for lengths, _ in measured
    ]
    seconds = np.array([time for _, time in measured], np.float64)
    if sum(tokens > 0 for _, tokens, _ in rows) < 2:
        raise ValueError(f"calibration needs at least two steps with tokens, got {len(rows)} steps")
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError(f"calibration needs positive times, got {seconds.min():g}")
    design = np.array(rows) / seconds[:, None]
    scale = design.max(axis=0)  # columns differ by many orders of magnitude
    best, best_error = np.zeros(3), math.inf
    for size in (3, 2, 1):
        for chosen in combinations(range(3), size):
            if chosen == (0,):
                continue  # a cost that ignores the length cannot balance anything
            columns = list(chosen)
            solution = np.linalg.lstsq(design[:, columns] / scale[columns], np.ones(len(rows)), rcond=None)[0]
            fit = np.zeros(3)
            fit[columns] = solution / scale[columns]
            error = float(np.square(design @ fit - 1).sum())
            if (solution >= 0).all() and fit[1] + fit[2] > 0 and error < best_error:
                best, best_error = fit, error
    assert best_error < math.inf, "one positive coefficient always fits positive times"
    return CostModel(a=float(best[1]), b=float(best[2]), fixed=float(best[0]))
