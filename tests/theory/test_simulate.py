"""The simulated training is the one that the theorems speak of."""

from __future__ import annotations

import math

import pytest
import torch

from tools.theory.problem import Problem
from tools.theory.simulate import mean, simulate

QUIET = Problem((1,), "quadratic", mu=1.0)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_rows_are_read_late_and_the_dense_parameter_is_not(delay):
    table, dense = [2.0], [2.0]
    for step in range(9):
        table.append(table[-1] - 0.2 * table[step - min(step, delay)])
        dense.append(dense[-1] - 0.2 * dense[-1])
    found = simulate(QUIET, lr=0.2, delay=delay, steps=10, seeds=2, start=2.0)
    squares = [w**2 + v**2 for w, v in zip(table, dense, strict=True)]
    torch.testing.assert_close(found.gradient, torch.full((2,), sum(squares) / 10, dtype=torch.float64))
    torch.testing.assert_close(found.loss, torch.full((2,), sum(squares) / 20, dtype=torch.float64))
    drift = sum((table[step - min(step, delay)] - table[step]) ** 2 for step in range(10)) / 10
    torch.testing.assert_close(found.bias, torch.full((2,), drift, dtype=torch.float64))


def test_adagrad_accumulates_the_current_square_and_adds_eps_outside_the_root():
    table, dense, square, dense_square = [2.0], [2.0], 0.0, 0.0
    for step in range(4):
        grad = table[step - min(step, 1)]
        square, dense_square = square + grad**2, dense_square + dense[-1] ** 2
        table.append(table[-1] - 0.3 * grad / (math.sqrt(square) + 0.5))
        dense.append(dense[-1] - 0.3 * dense[-1] / (math.sqrt(dense_square) + 0.5))
    found = simulate(QUIET, lr=0.3, delay=1, steps=5, seeds=1, start=2.0, optimizer="adagrad", eps=0.5)
    assert float(found.gradient) == pytest.approx(sum(w**2 + v**2 for w, v in zip(table, dense, strict=True)) / 5)


def test_without_delay_every_kind_of_delay_is_the_same():
    problem = Problem((3, 2), "periodic", c=0.3, row_noise=1.0, dense_noise=1.0)
    settings = {"lr": 0.1, "delay": 0, "steps": 20, "seeds": 5, "start": 1.0}
    late, contrary = (simulate(problem, delays=kind, **settings) for kind in ("scheduled", "contrary"))
    assert torch.equal(late.gradient, contrary.gradient)
    assert not late.bias.any() and contrary.bias.isnan().all()


def test_contrary_delays_differ_from_none():
    problem = Problem((1, 1), "periodic", row_noise=1.0)
    fresh, stale = (
        simulate(problem, lr=0.3, delay=delay, steps=20, seeds=3, start=1.0, delays="contrary") for delay in (0, 4)
    )
    assert not torch.equal(fresh.gradient, stale.gradient)


def test_a_mean_has_its_standard_error():
    found = mean(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    assert found.value == 3.0
    assert found.error == pytest.approx(math.sqrt(14 / 3 / 4))
