"""The right-hand sides of the theorems of docs/theory, and the step sizes that they allow.

`delta` is f(x₀) − inf f, `lr` the step size η, `delay` the largest delay τ, `steps` the number of steps T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tools.theory.problem import Constants


def any_delays(k: Constants, *, delta: float, lr: float, delay: int, steps: int) -> float:
    """Theorem 1: a bound on the mean of E‖∇f(x_t)‖² for SGD, whatever decides the delays."""
    stale = k.gamma * (lr * delay) ** 2 * k.weighted_moment
    return 2 * delta / (lr * steps) + k.smoothness * lr * k.second_moment + stale


def scheduled(k: Constants, *, delta: float, lr: float, delay: int, steps: int, stale_factor: float = 2.0) -> float:
    """Theorem 2: a bound on the mean of E‖∇f(x_t)‖² + ω E‖∇f(x̂_t)‖² for SGD, with ω from `view_weight`.

    `stale_factor` is the theorem's constant before the stale term; another one is no theorem.
    """
    noise = (k.smoothness * lr + stale_factor * k.kappa**2 * lr**2 * delay) * k.variance
    return 2 * delta / (lr * steps) + noise


def view_weight(k: Constants, *, lr: float, delay: int) -> float:
    """Return ω of Theorem 2, which must not be negative for the bound to say anything about ∇f(x_t) alone."""
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
    k: Constants, chances: Sequence[float], *, delta: float, lr: float, eps: float, delay: int, steps: int
) -> float:
    """Theorem 4: a bound on the mean of E‖∇f(x̂_t)‖² for Adagrad; `chances` holds p_r of every row, of width 1."""
    travelled, shared = table_travel(k, chances, eps=eps, steps=steps)
    dense_travelled = math.log1p(steps * (k.dense_range / eps) ** 2)
    total_travelled = sum(travelled) + dense_travelled
    noise = _row_noise(k, chances, travelled) + 2 * k.dense_range * dense_travelled
    stale = 2 * delay * math.sqrt(k.gamma * shared * total_travelled)
    bracket = 2 * delta / lr + noise + (k.smoothness * total_travelled + stale) * lr
    return (max(k.row_range, k.dense_range) * math.sqrt(steps) + eps) / steps * bracket


def adagrad_current(
    k: Constants, chances: Sequence[float], *, delta: float, lr: float, eps: float, delay: int, steps: int
) -> float:
    """Theorem 4's second bound, on the mean of E‖∇f(x_t)‖²."""
    bound = adagrad(k, chances, delta=delta, lr=lr, eps=eps, delay=delay, steps=steps)
    shared = table_travel(k, chances, eps=eps, steps=steps)[1]
    return 2 * bound + 2 * k.gamma * shared * (lr * delay) ** 2 / steps


def adagrad_table(
    k: Constants, chances: Sequence[float], *, delta: float, lr: float, eps: float, delay: int, steps: int
) -> float:
    """Theorem 4′: a bound on the mean of E‖∇_w f(x̂_t)‖² for Adagrad on the table; `delta` is Δ + J."""
    travelled, shared = table_travel(k, chances, eps=eps, steps=steps)
    stale = 2 * delay * k.row_lipschitz * math.sqrt(k.alpha * shared * sum(travelled))
    bracket = 2 * delta / lr + _row_noise(k, chances, travelled) + (k.table_smoothness * sum(travelled) + stale) * lr
    return (k.row_range * math.sqrt(steps) + eps) / steps * bracket


def table_travel(k: Constants, chances: Sequence[float], *, eps: float, steps: int) -> tuple[list[float], float]:
    """Return Lemma 4's Λ of every row, of width 1, and Σ p_r Λ_r."""
    travelled = [math.log1p(chance * steps * (k.row_range / eps) ** 2) for chance in chances]
    return travelled, sum(chance * one for chance, one in zip(chances, travelled, strict=True))


def _row_noise(k: Constants, chances: Sequence[float], travelled: Sequence[float]) -> float:
    return sum(2 * math.sqrt(chance) * k.row_range * one for chance, one in zip(chances, travelled, strict=True))


def drift(k: Constants, weighted_step: float, *, lr: float, delay: int) -> float:
    """Return the bound on the mean of E‖b_t‖² in the proofs of Theorems 1 and 4, given that of Σ_r p_r E‖u_{t,r}‖²."""
    return k.gamma * (lr * delay) ** 2 * weighted_step


def bounded_steps(k: Constants, chances: Sequence[float], largest: float, *, delay: int) -> float:
    """Theorem 5, and the sharper form of Theorem 1: a bound on E‖b_t‖² if no row, of width 1, moves by more than
    `largest` in a step."""
    shared = sum(chance**2 * (1 + (delay - 1) * chance) for chance in chances)
    return k.gamma * largest**2 * delay * shared
