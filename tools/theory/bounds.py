"""The right-hand sides of the theorems of docs/theory, and the step sizes that they allow.

`delta` is f(x₀) − inf f, `lr` the step size η, `delay` the largest delay τ, `steps` the number of steps T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tools.theory.problem import Constants


def any_delays(k: Constants, *, delta: float, lr: float, delay: int, steps: int) -> float:
    """Theorem 1: a bound on the mean of E‖∇f(x_t)‖² for SGD with any delays."""
    stale = k.gamma * (lr * delay) ** 2 * k.weighted_moment
    return 2 * delta / (lr * steps) + k.smoothness * lr * k.second_moment + stale


def scheduled(k: Constants, *, delta: float, lr: float, delay: int, steps: int, stale_factor: float = 2.0) -> float:
    """Theorem 2: a bound on the mean of E‖∇f(x_t)‖² + ω E‖∇f(x̂_t)‖² for SGD, with ω from `view_weight`.

    `stale_factor` is the constant of the stale term; the theorem holds for 2.
    """
    noise = (k.smoothness * lr + stale_factor * k.kappa**2 * lr**2 * delay) * k.variance
    return 2 * delta / (lr * steps) + noise


def view_weight(k: Constants, *, lr: float, delay: int) -> float:
    """Return ω of Theorem 2, which must not be negative if the bound is to hold for ∇f(x_t) alone."""
    stale = 2 * (k.kappa * lr) ** 2 * delay * (delay + k.growth)
    return 1 - (1 + k.growth) * k.smoothness * lr - stale


def largest_lr(k: Constants, delay: int) -> float:
    """Return a step size that Theorems 2 and 3 both allow for this delay."""
    curvature = max(k.kappa**2, k.table_smoothness * k.smoothness)
    return 1 / ((1 + k.growth) * k.smoothness + math.sqrt(2 * curvature * delay * (delay + k.growth)))


def convex(k: Constants, *, distance: float, lr: float, delay: int, steps: int) -> float:
    """Theorem 3: a bound on the mean of E f(x_t) − f* for SGD on a convex f; `distance` is ‖x₀ − x*‖²."""
    noise = (lr / 2 + k.table_smoothness * lr**2 * delay) * k.variance
    return distance / (2 * lr * steps) + noise


def adagrad(
    k: Constants, probs: Sequence[float], *, delta: float, lr: float, eps: float, delay: int, steps: int
) -> float:
    """Theorem 4: a bound on the mean of E‖∇f(x̂_t)‖² for Adagrad; `probs` holds p_r of every row, of width 1."""
    row_log_sums, weighted_log_sum = log_sums(k, probs, eps=eps, steps=steps)
    dense_log_sum = math.log1p(steps * (k.dense_range / eps) ** 2)
    total_log_sum = sum(row_log_sums) + dense_log_sum
    noise = _row_noise(k, probs, row_log_sums) + 2 * k.dense_range * dense_log_sum
    stale = 2 * delay * math.sqrt(k.gamma * weighted_log_sum * total_log_sum)
    bracket = 2 * delta / lr + noise + (k.smoothness * total_log_sum + stale) * lr
    return (max(k.row_range, k.dense_range) * math.sqrt(steps) + eps) / steps * bracket


def adagrad_current(
    k: Constants, probs: Sequence[float], *, delta: float, lr: float, eps: float, delay: int, steps: int
) -> float:
    """Theorem 4's second bound, on the mean of E‖∇f(x_t)‖²."""
    bound = adagrad(k, probs, delta=delta, lr=lr, eps=eps, delay=delay, steps=steps)
    weighted_log_sum = log_sums(k, probs, eps=eps, steps=steps)[1]
    return 2 * bound + 2 * k.gamma * weighted_log_sum * (lr * delay) ** 2 / steps


def adagrad_table(
    k: Constants, probs: Sequence[float], *, delta: float, lr: float, eps: float, delay: int, steps: int
) -> float:
    """Theorem 4′: a bound on the mean of E‖∇_w f(x̂_t)‖² for Adagrad on the table; `delta` is Δ + J."""
    row_log_sums, weighted_log_sum = log_sums(k, probs, eps=eps, steps=steps)
    stale = 2 * delay * k.row_lipschitz * math.sqrt(k.alpha * weighted_log_sum * sum(row_log_sums))
    noise = _row_noise(k, probs, row_log_sums)
    bracket = 2 * delta / lr + noise + (k.table_smoothness * sum(row_log_sums) + stale) * lr
    return (k.row_range * math.sqrt(steps) + eps) / steps * bracket


def amsgrad(
    k: Constants, probs: Sequence[float], *, delta: float, lr: float, eps: float, beta: float, delay: int, steps: int
) -> float:
    """Theorem 6: a bound on the mean of E‖∇f(x_t)‖² for AMSGrad without momentum, for the rows of width 1."""
    sum_of_squares = sum(prob * k.row_range**2 for prob in probs) + k.dense_range**2
    change = lr**2 / (1 - beta)  # of a row by one update, squared
    stale = k.gamma * change * delay * sum(prob**2 * (1 + (delay - 1) * prob) for prob in probs)
    largest = max(k.row_range, k.dense_range) + eps
    bracket = delta / (lr * steps) + sum_of_squares / (eps * steps)
    return 2 * largest * (bracket + k.smoothness * lr * sum_of_squares / (2 * eps**2) + stale / (2 * eps))


def log_sums(k: Constants, probs: Sequence[float], *, eps: float, steps: int) -> tuple[list[float], float]:
    """Return Lemma 4's Λ of every row, of width 1, and Σ p_r Λ_r."""
    row_log_sums = [math.log1p(prob * steps * (k.row_range / eps) ** 2) for prob in probs]
    return row_log_sums, sum(prob * one for prob, one in zip(probs, row_log_sums, strict=True))


def _row_noise(k: Constants, probs: Sequence[float], row_log_sums: Sequence[float]) -> float:
    return sum(2 * math.sqrt(prob) * k.row_range * one for prob, one in zip(probs, row_log_sums, strict=True))


def drift(k: Constants, weighted_step: float, *, lr: float, delay: int) -> float:
    """Return the bound on the mean of E‖b_t‖² in the proofs of Theorems 1 and 4, given that of Σ_r p_r E‖u_{t,r}‖²."""
    return k.gamma * (lr * delay) ** 2 * weighted_step


def bounded_steps(k: Constants, probs: Sequence[float], largest: float, *, delay: int) -> float:
    """Theorem 5, and the sharper form of Theorem 1: a bound on E‖b_t‖² if no row, of width 1, changes by more than
    `largest` in a step."""
    shared = sum(prob**2 * (1 + (delay - 1) * prob) for prob in probs)
    return k.gamma * largest**2 * delay * shared
