"""Training problems for which every constant in the theorems of docs/theory is known in closed form.

A batch takes one row from each of m slots, uniformly, so a row of a slot of q rows is read with probability 1/q. With
s(u) = u ("quadratic") or s(u) = sin u ("periodic", not convex) and φ' = s, φ(0) = 0, the loss of a batch that reads the
rows R of the table w, and the dense parameter θ, is

    F = Σ_{r in R} [a φ(w_r) + c s(w_r) s(θ) + z_r w_r] + μ φ(θ) + z_0 θ

where the noise z is ± `row_noise` and ± `dense_noise` with equal probability. If c² m ≤ a μ, the mean loss f is at
least 0, and 0 at the origin. Independent runs (seeds) are held in one tensor; S is their number, V that of the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """`rows` [S, m] distinct within a run, their noise `row_noise` [S, m], and `dense_noise` [S]."""

    rows: Tensor
    row_noise: Tensor
    dense_noise: Tensor


@dataclass(frozen=True)
class Problem:
    """`slots`: the number of rows of each slot. The other letters are those of the module's formula.

    Raises:
        ValueError: c² m > a μ, for which the minimum of the loss is not known.
    """

    slots: tuple[int, ...]
    shape: Literal["quadratic", "periodic"]
    a: float = 1.0
    c: float = 0.0
    mu: float = 1.0
    row_noise: float = 0.0
    dense_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.c**2 * len(self.slots) > self.a * self.mu:
            raise ValueError(f"c² m must be at most a μ, got {self.c**2 * len(self.slots)} > {self.a * self.mu}")

    @property
    def num_rows(self) -> int:
        return sum(self.slots)

    @cached_property
    def probs(self) -> Tensor:
        """The probability p_r of each row [V]."""
        sizes = torch.tensor(self.slots, dtype=torch.float64)
        return (1 / sizes).repeat_interleave(torch.tensor(self.slots))

    def loss(self, table: Tensor, dense: Tensor) -> Tensor:
        """Return f [S] at `table` [S, V] and `dense` [S]."""
        coupled = self.c * self._s(table) * self._s(dense)[:, None]
        return ((self.a * self._phi(table) + coupled) * self.probs).sum(1) + self.mu * self._phi(dense)

    def gradient(self, table: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of f: of the table [S, V] and of the dense parameter [S]."""
        sums = (self._s(table) * self.probs).sum(1)
        return self._row_slope(table, dense) * self.probs, self._dense_slope(sums, dense)

    def draw(self, seeds: int, generator: torch.Generator) -> Batch:
        """Draw a batch for each of `seeds` runs."""
        first, rows = 0, []
        for size in self.slots:
            rows.append(first + torch.randint(size, (seeds,), generator=generator))
            first += size
        signs = torch.randint(2, (seeds, len(self.slots) + 1), generator=generator).double() * 2 - 1
        return Batch(torch.stack(rows, 1), signs[:, 1:] * self.row_noise, signs[:, 0] * self.dense_noise)

    def sample_gradient(self, read: Tensor, dense: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the gradient of F where the batch's rows were read as `read` [S, m]: of these rows, and of θ."""
        slope = self._dense_slope(self._s(read).sum(1), dense)
        return self._row_slope(read, dense) + batch.row_noise, slope + batch.dense_noise

    def _s(self, u: Tensor) -> Tensor:
        return u if self.shape == "quadratic" else u.sin()

    def _phi(self, u: Tensor) -> Tensor:
        return u**2 / 2 if self.shape == "quadratic" else 1 - u.cos()

    def _slope_of_s(self, u: Tensor) -> Tensor:
        return torch.ones_like(u) if self.shape == "quadratic" else u.cos()

    def _row_slope(self, rows: Tensor, dense: Tensor) -> Tensor:
        return self.a * self._s(rows) + self.c * self._slope_of_s(rows) * self._s(dense)[:, None]

    def _dense_slope(self, sums: Tensor, dense: Tensor) -> Tensor:
        return self.mu * self._s(dense) + self.c * self._slope_of_s(dense) * sums


@dataclass(frozen=True)
class Constants:
    """The constants of docs/theory/semi-async.md for one problem, under the names of its notation table.

    `second_moment` is G², `table_moment` the bound on Σ_r E‖g_r‖², `weighted_moment` that on Σ_r p_r E‖g_r‖²;
    `row_range` and `dense_range` bound a coordinate of the gradient. These five are infinite for a quadratic.
    """

    alpha: float
    collision_rate: float
    smoothness: float
    row_lipschitz: float
    dense_lipschitz: float
    variance: float
    growth: float
    second_moment: float
    table_moment: float
    weighted_moment: float
    row_range: float
    dense_range: float

    @property
    def gamma(self) -> float:
        """Γ of Lemma 1."""
        return self.alpha * self.row_lipschitz**2 + self.dense_lipschitz**2

    @property
    def kappa(self) -> float:
        """Lemma 1's Lipschitz constant κ of the mean gradient in the table."""
        return math.sqrt(self.alpha * self.gamma)

    @property
    def table_smoothness(self) -> float:
        """Lemma 1's λ, the smoothness of f in the table alone."""
        return self.alpha * self.row_lipschitz


def constants(problem: Problem) -> Constants:
    """Return every constant of a problem; docs/theory/check.md derives them."""
    num_slots, a, c, mu = len(problem.slots), problem.a, problem.c, problem.mu
    probs = [1 / size for size in problem.slots]
    periodic = problem.shape == "periodic"
    row_slope = math.hypot(a, c) if periodic else a
    dense_slope = math.hypot(mu, c * num_slots) if periodic else mu
    table_noise, dense_noise = num_slots * problem.row_noise**2, problem.dense_noise**2
    variance, growth = table_noise + dense_noise, 0.0
    table_moment = weighted_moment = second_moment = row_range = dense_range = math.inf
    if periodic:
        random_slots = sum(size > 1 for size in problem.slots)
        variance += sum((1 - p) * row_slope**2 for p in probs) + c**2 * random_slots
        row_range, dense_range = row_slope + problem.row_noise, dense_slope + problem.dense_noise
        table_moment, weighted_moment = num_slots * row_range**2, sum(probs) * row_range**2
        second_moment = table_moment + dense_range**2
    else:
        growth = max((1 - p + (c / a) ** 2 * (p < 1)) / p for p in probs)
    return Constants(
        alpha=max(probs),
        collision_rate=sum(probs) / num_slots,
        smoothness=_smoothness(probs, row_slope, c, dense_slope),
        row_lipschitz=row_slope,
        dense_lipschitz=c * math.sqrt(num_slots),
        variance=variance,
        growth=growth,
        second_moment=second_moment,
        table_moment=table_moment,
        weighted_moment=weighted_moment,
        row_range=row_range,
        dense_range=dense_range,
    )


def _smoothness(probs: list[float], row_slope: float, c: float, dense_slope: float) -> float:
    """The norm of the matrix of largest second derivatives, in which the rows of a slot are one direction."""
    matrix = torch.diag(torch.tensor([*(p * row_slope for p in probs), dense_slope], dtype=torch.float64))
    edge = torch.tensor([c * math.sqrt(p) for p in probs], dtype=torch.float64)
    matrix[-1, :-1], matrix[:-1, -1] = edge, edge
    return float(torch.linalg.eigvalsh(matrix)[-1])
