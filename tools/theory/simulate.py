"""Training with delayed reads on the problems of `problem`, many seeds at once, and what the theorems speak of.

Updates always reach the current table and the current optimiser state; only what a batch reads from the table may be
old, and the dense parameter is never old. Adagrad is the project's own row operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tools.theory.problem import Batch, Problem
from turbogr.ops import row_adagrad_

Optimizer = Literal["sgd", "adagrad"]
Delays = Literal["scheduled", "contrary"]


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Measured:
    """Averages over the steps of one set of runs.

    `gradient` is ‖∇f(x_t)‖², `view_gradient` ‖∇f(x̂_t)‖², `bias` ‖∇f(x̂_t) − ∇f(x_t)‖², `loss` f(x_t), each [S].
    Contrary delays have no view of the whole table, and `view_gradient` and `bias` are then not a number.
    """

    gradient: Tensor
    view_gradient: Tensor
    bias: Tensor
    loss: Tensor


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
    eps: float = 1e-8,
    delays: Delays = "scheduled",
    seed: int = 0,
) -> Measured:
    """Train from all parameters = `start` and average over the steps.

    Scheduled: step t reads the table as it was before step t − min(t, delay). Contrary: a row is read as it was when it
    differed most from now, at most `delay` steps ago, but only where the batch's noise is positive, so that the delay
    depends on the batch itself.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.full((seeds, problem.num_rows), start, dtype=torch.float64)
    dense = torch.full((seeds,), start, dtype=torch.float64)
    squares = torch.zeros_like(table), torch.zeros_like(dense)
    past = torch.zeros(delay + 1, *table.shape, dtype=torch.float64)
    totals = torch.zeros(4, seeds, dtype=torch.float64)
    for step in range(steps):
        past[step % (delay + 1)] = table
        batch = problem.draw(seeds, generator)
        view = past[(step - min(step, delay)) % (delay + 1)]
        totals += _observe(problem, table, dense, view if delays == "scheduled" else None)
        read = view.gather(1, batch.rows) if delays == "scheduled" else _contrary(past[: step + 1], table, batch)
        row_grad, dense_grad = problem.sample_gradient(read, dense, batch)
        if optimizer == "sgd":
            table.scatter_add_(1, batch.rows, -lr * row_grad)
            dense -= lr * dense_grad
        else:
            _adagrad(table, squares[0], batch.rows, row_grad, lr, eps)
            _adagrad(dense[:, None], squares[1][:, None], torch.zeros(seeds, 1, dtype=torch.int64), dense_grad, lr, eps)
    return Measured(*(totals / steps))


def _observe(problem: Problem, table: Tensor, dense: Tensor, view: Tensor | None) -> Tensor:
    rows, slope = problem.gradient(table, dense)
    gradient = rows.square().sum(1) + slope.square()
    loss = problem.loss(table, dense)
    if view is None:
        unknown = torch.full_like(loss, math.nan)
        return torch.stack([gradient, unknown, unknown, loss])
    view_rows, view_slope = problem.gradient(view, dense)
    view_gradient = view_rows.square().sum(1) + view_slope.square()
    bias = (view_rows - rows).square().sum(1) + (view_slope - slope).square()
    return torch.stack([gradient, view_gradient, bias, loss])


def _contrary(past: Tensor, table: Tensor, batch: Batch) -> Tensor:
    """Return the batch's rows [S, m] out of `past` [ages, S, V], the oldest differing most where the noise is > 0."""
    now = table.gather(1, batch.rows)
    candidates = past.gather(2, batch.rows.expand(len(past), -1, -1))
    furthest = (candidates - now).abs().argmax(0, keepdim=True)
    return torch.where(batch.row_noise > 0, candidates.gather(0, furthest)[0], now)


def _adagrad(weight: Tensor, square: Tensor, rows: Tensor, grad: Tensor, lr: float, eps: float) -> None:
    """Update `rows` [S, m] of `weight` [S, V] in place, every (run, row) being a row of width 1 to the operator."""
    seeds, num_rows = weight.shape
    index = (torch.arange(seeds)[:, None] * num_rows + rows).flatten()
    row_adagrad_(weight.view(-1, 1), square.view(-1, 1), index, grad.reshape(-1, 1), lr=lr, eps=eps)
