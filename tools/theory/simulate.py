"""Train with delayed reads on the problems of `problem`, many seeds at once, and measure the theorems' quantities.

Updates are always applied to the current table and optimiser state. Only the rows that a batch reads may be old; the
dense parameter is always current. Adagrad is TurboGR's own row operator; AMSGrad is without momentum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tools.theory.problem import Problem
from turbogr.ops import row_adagrad_, row_adam_

Optimizer = Literal["sgd", "adagrad", "amsgrad"]
DenseOptimizer = Literal["same", "adam"]
Delays = Literal["scheduled", "scattered", "adversarial"]
_ADAM_LR, _ADAM_BETAS = 0.01, (0.9, 0.98)


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Measured:
    """Averages over the steps of one set of runs, each [S].

    `gradient` is ‖∇f(x_t)‖², `view_gradient` ‖ḡ_t‖² for the mean ḡ_t of the gradient used, `table_gradient` the table's
    part of that, `bias` ‖b_t‖² for b_t = ḡ_t − ∇f(x_t), and `loss` f(x_t). The update is −η u_t: `step` is ‖u_t‖²,
    `weighted_step` Σ p_i u²_{t,i} over the table, `alignment` ⟨b_t, u_t⟩; `dense_change` the change of f by θ's step.
    """

    gradient: Tensor
    view_gradient: Tensor
    table_gradient: Tensor
    bias: Tensor
    loss: Tensor
    step: Tensor
    weighted_step: Tensor
    alignment: Tensor
    dense_change: Tensor


def mean(values: Tensor) -> Mean:
    """Return the mean of independent values [S] and its standard error."""
    return Mean(float(values.mean()), float(values.std() / math.sqrt(len(values))))


def simulate(
    problem: Problem,
    *,
    lr: float,
    delay: int,
    steps: int,
    seeds: int,
    start: float = 0.0,
    optimizer: Optimizer = "sgd",
    dense_optimizer: DenseOptimizer = "same",
    eps: float = 1e-8,
    delays: Delays = "scheduled",
    seed: int = 0,
) -> Measured:
    """Train from all parameters = `start` and average over the steps.

    Scheduled: step t reads the table as it was before step t − min(t, delay). Scattered: row r has the delay
    min(t, r mod (delay + 1)). Adversarial: a row is read with the delay, up to `delay`, at which it differed most
    from its current value, but only if the batch's noise is positive, so that the delay depends on the batch itself.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.full((seeds, problem.num_rows), start, dtype=torch.float64)
    dense = torch.full((seeds,), start, dtype=torch.float64)
    squares = torch.zeros_like(table), torch.zeros_like(dense)
    moments = torch.zeros_like(dense), torch.zeros_like(dense)
    largest = torch.zeros_like(table), torch.zeros_like(dense)
    past = torch.zeros(delay + 1, *table.shape, dtype=torch.float64)
    ages = torch.arange(problem.num_rows) % (delay + 1) if delays == "scattered" else torch.full((1,), delay)
    totals = torch.zeros(9, seeds, dtype=torch.float64)
    for step in range(steps):
        before = table.clone(), dense.clone()
        past[step % (delay + 1)] = table
        batch = problem.draw(seeds, generator)
        if delays == "adversarial":
            view = _furthest(past[: step + 1], table)
            read = torch.where(batch.row_noise > 0, view.gather(1, batch.rows), table.gather(1, batch.rows))
            views = [view, before[0]] if problem.row_noise else [before[0]]
        else:
            read_at = (step - ages.clamp(max=step)) % (delay + 1)
            view = past.gather(0, read_at.expand(1, *table.shape))[0]
            read, views = view.gather(1, batch.rows), [view]
        row_grad, dense_grad = problem.sample_gradient(read, dense, batch)
        if optimizer == "sgd":
            table.scatter_add_(1, batch.rows, -lr * row_grad)
        elif optimizer == "amsgrad":
            _amsgrad(table, squares[0], largest[0], batch.rows, row_grad, lr, eps)
        else:
            _adagrad(table, squares[0], batch.rows, row_grad, lr, eps)
        if dense_optimizer == "adam":
            _adam(dense, *moments, dense_grad, step + 1)
        elif optimizer == "sgd":
            dense -= lr * dense_grad
        elif optimizer == "amsgrad":
            everywhere = torch.zeros(seeds, 1, dtype=torch.int64)
            state = (one[:, None] for one in (dense, squares[1], largest[1]))
            _amsgrad(*state, everywhere, dense_grad.view(-1, 1), lr, eps)
        else:
            _adagrad(dense[:, None], squares[1][:, None], torch.zeros(seeds, 1, dtype=torch.int64), dense_grad, lr, eps)
        totals += _observe(problem, views, before, (table, dense), lr)
    return Measured(*(totals / steps))


def _amsgrad(
    weight: Tensor, square: Tensor, largest: Tensor, rows: Tensor, grad: Tensor, lr: float, eps: float
) -> None:
    """Update the distinct `rows` [S, m] of `weight` [S, V] in place, and only theirs of the state."""
    beta = _ADAM_BETAS[1]
    now = beta * square.gather(1, rows) + (1 - beta) * grad.square()
    most = torch.maximum(largest.gather(1, rows), now)
    square.scatter_(1, rows, now)
    largest.scatter_(1, rows, most)
    weight.scatter_add_(1, rows, -lr * grad / (most.sqrt() + eps))


def _observe(
    problem: Problem, views: list[Tensor], before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], lr: float
) -> Tensor:
    """Return the values that `Measured` averages [9, S] for one step, whose table is each of `views` equally often."""
    table, dense = before
    now = _whole(problem.gradient(table, dense))
    used = torch.stack([_whole(problem.gradient(view, dense)) for view in views]).mean(0)
    moved = (_whole(before) - _whole(after)) / lr
    return torch.stack(
        [
            now.square().sum(1),
            used.square().sum(1),
            used[:, :-1].square().sum(1),
            (used - now).square().sum(1),
            problem.loss(table, dense),
            moved.square().sum(1),
            (moved[:, :-1].square() * problem.probs).sum(1),
            ((used - now) * moved).sum(1),
            problem.loss(*after) - problem.loss(after[0], dense),
        ]
    )


def _whole(parts: tuple[Tensor, Tensor]) -> Tensor:
    """Return [S, V + 1] of what belongs to the table [S, V] and to the dense parameter [S]."""
    return torch.cat([parts[0], parts[1][:, None]], 1)


def _furthest(past: Tensor, table: Tensor) -> Tensor:
    """Return of `past` [ages, S, V] for each row the value that differs most from that of `table` [S, V]."""
    return past.gather(0, (past - table).abs().argmax(0, keepdim=True))[0]


def _adagrad(weight: Tensor, square: Tensor, rows: Tensor, grad: Tensor, lr: float, eps: float) -> None:
    """Update `rows` [S, m] of `weight` [S, V] in place, every (run, row) being a row of width 1 to the operator."""
    seeds, num_rows = weight.shape
    index = (torch.arange(seeds)[:, None] * num_rows + rows).flatten()
    row_adagrad_(weight.view(-1, 1), square.view(-1, 1), index, grad.reshape(-1, 1), lr=lr, eps=eps)


def _adam(weight: Tensor, average: Tensor, square: Tensor, grad: Tensor, number: int) -> None:
    """Update `weight` [S] in place, every run being a row of width 1 to the operator."""
    state = (one.view(-1, 1) for one in (weight, average, square))
    row_adam_(*state, torch.arange(len(weight)), grad[:, None], step=number, lr=_ADAM_LR, betas=_ADAM_BETAS, eps=1e-8)
