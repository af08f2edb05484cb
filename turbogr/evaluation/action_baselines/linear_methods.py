"""Logistic regression and factorisation machines on sparse rows; linear regression where the task is a number.

Both read `ActionRows.one_hot`: ids, features and what is known of earlier events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

Floats = NDArray[np.float64]

_ITERATIONS = 60


@dataclass(frozen=True)
class Problem:
    """Training rows X [n, c] with labels y [n], of which numbers are standardised by `mean` and `scale`."""

    rows: sparse.csr_matrix
    labels: Floats
    binary: bool
    mean: float
    scale: float
    stop: Callable[[], None]

    @classmethod
    def of(cls, rows: sparse.csr_matrix, labels: Floats, binary: bool, stop: Callable[[], None]) -> Problem:
        mean, scale = (0.0, 1.0) if binary else (float(labels.mean()), float(labels.std()) or 1.0)
        return cls(rows, (labels - mean) / scale, binary, mean, scale, stop)

    def predictions(self, scores: NDArray[np.floating]) -> Floats:
        """Return what scores predict: probabilities, or numbers in their own unit."""
        return probabilities(scores) if self.binary else np.asarray(scores, np.float64) * self.scale + self.mean

    def errors(self, scores: NDArray[np.floating], labels: Floats) -> Floats:
        """Return the derivative of the loss by the scores, of log loss or half the squared error."""
        return (probabilities(scores) if self.binary else scores) - labels


def fit_linear(problem: Problem, decay: float, start: Floats | None = None) -> Floats:
    """Return the weights [c] of least mean loss + decay / 2 · |w|², by L-BFGS; the last one, the constant, is free."""
    x, y, n = problem.rows, problem.labels, len(problem.labels)
    transposed = x.T.tocsr()
    decays = np.full(x.shape[1], decay)
    decays[-1] = 0

    def loss(weights: Floats) -> tuple[float, Floats]:
        problem.stop()
        scores = np.asarray(x @ weights.astype(np.float32), np.float64)
        if problem.binary:
            value = float(np.mean(np.logaddexp(0, scores) - y * scores))
        else:
            value = float(np.mean((scores - y) ** 2)) / 2
        errors = (problem.errors(scores, y) / n).astype(np.float32)
        gradient = np.asarray(transposed @ errors, np.float64) + decays * weights
        return value + 0.5 * float(decays @ (weights * weights)), gradient

    initial = np.zeros(x.shape[1]) if start is None else start
    found = optimize.minimize(loss, initial, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS})
    weights: Floats = found.x
    return weights


@dataclass(frozen=True)
class FactorSettings:
    """Settings of a factorisation machine; `decay` is of weights and factors, per step and row that is used."""

    factors: int
    lr: float
    decay: float
    batch_size: int = 2048


class FactorisationMachine:
    """w·x + ½ Σ_f ((Σ_i v_if x_i)² - Σ_i v_if² x_i²), trained by Adagrad on shuffled batches."""

    def __init__(self, problem: Problem, settings: FactorSettings, start: Floats, seed: int) -> None:
        self.problem, self.settings = problem, settings
        rng = self._rng = np.random.default_rng(seed)
        num = problem.rows.shape[1]
        self.weights = start.astype(np.float32)
        self.factors = rng.normal(0, 0.01, (num, settings.factors)).astype(np.float32)
        self._squares = [np.full(num, 1e-6, np.float32), np.full((num, settings.factors), 1e-6, np.float32)]

    def scores(self, rows: sparse.csr_matrix) -> NDArray[np.float32]:
        """Return the scores of rows [n, c]."""
        squared = _squared(rows)
        found = rows @ self.weights + 0.5 * (((rows @ self.factors) ** 2).sum(1) - (squared @ (self.factors**2)).sum(1))
        return np.asarray(found, np.float32)

    def train_epoch(self) -> None:
        """Go through the training rows once."""
        order = self._rng.permutation(len(self.problem.labels))
        for first in range(0, len(order), self.settings.batch_size):
            self.problem.stop()
            chosen = np.sort(order[first : first + self.settings.batch_size])
            self._step(self.problem.rows[chosen], self.problem.labels[chosen])

    def _step(self, rows: sparse.csr_matrix, labels: Floats) -> None:
        used = np.unique(rows.indices)
        compact = sparse.csr_matrix(
            (rows.data, np.searchsorted(used, rows.indices), rows.indptr), (rows.shape[0], len(used))
        )
        squared = _squared(compact)
        weights, factors = self.weights[used], self.factors[used]
        sums = compact @ factors
        scores = compact @ weights + 0.5 * ((sums**2).sum(1) - (squared @ factors**2).sum(1))
        errors = (self.problem.errors(scores, labels) / len(labels)).astype(np.float32)
        decay = self.settings.decay
        by_weight = compact.T @ errors + decay * weights
        by_factor = compact.T @ (errors[:, None] * sums) - (squared.T @ errors)[:, None] * factors + decay * factors
        for values, gradient, squares in zip(
            (self.weights, self.factors), (by_weight, by_factor), self._squares, strict=True
        ):
            squares[used] += gradient**2
            values[used] -= self.settings.lr * gradient / np.sqrt(squares[used])


def _squared(rows: sparse.csr_matrix) -> sparse.csr_matrix:
    return sparse.csr_matrix((rows.data**2, rows.indices, rows.indptr), rows.shape)


def probabilities(scores: NDArray[np.floating]) -> Floats:
    """Return the logistic function of scores."""
    return 1 / (1 + np.exp(-np.clip(np.asarray(scores, np.float64), -35, 35)))
