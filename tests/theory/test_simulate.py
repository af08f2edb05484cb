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
    kinds = [simulate(problem, delays=kind, **settings) for kind in ("scheduled", "scattered", "adversarial")]
    for found in kinds:
        assert torch.equal(found.gradient, kinds[0].gradient)
        assert not found.bias.any()


def test_adversarial_delays_differ_from_none():
    problem = Problem((1, 1), "periodic", row_noise=1.0)
    fresh, stale = (
        simulate(problem, lr=0.3, delay=delay, steps=20, seeds=3, start=1.0, delays="adversarial") for delay in (0, 4)
    )
    assert not torch.equal(fresh.gradient, stale.gradient)


def test_rows_may_have_different_delays():
    table, steps, lr = torch.full((1, 3), 2.0, dtype=torch.float64), 6, 0.2
    past, drift = [], 0.0
    for step in range(steps):
        past.append(table)
        view = torch.stack([past[step - min(step, row % 3)][0, row] for row in range(3)])[None]
        drift += float((view - table).square().sum())
        table = table - lr * view
    found = simulate(
        Problem((1, 1, 1), "quadratic"), lr=lr, delay=2, steps=steps, seeds=1, start=2.0, delays="scattered"
    )
    assert float(found.bias) == pytest.approx(drift / steps)


def test_the_mean_gradient_under_adversarial_delays_is_that_over_all_batches():
    problem = Problem((1, 1), "periodic", c=0.4, row_noise=0.3, dense_noise=0.2)
    drawn = torch.Generator().manual_seed(0)
    first = problem.draw(4096, drawn), problem.draw(4096, drawn)
    lr, dense = 0.5, torch.full((4096,), 1.0, dtype=torch.float64)
    table = dense[:, None].expand(-1, 2)
    rows, slope = problem.sample_gradient(table, dense, first[0])
    later, dense = table - lr * rows, dense - lr * slope
    read = torch.where(first[1].row_noise > 0, table, later)  # the table of the first step is all that is older
    used = torch.cat([one.view(4096, -1) for one in problem.sample_gradient(read, dense, first[1])], 1)
    fresh = torch.cat([one.view(4096, -1) for one in problem.sample_gradient(later, dense, first[1])], 1)
    found = simulate(problem, lr=lr, delay=1, steps=2, seeds=4096, start=1.0, delays="adversarial")
    # By the first step's signs all runs are one of eight; within each the mean over the second batch is the bias.
    signs = torch.cat([first[0].row_noise, first[0].dense_noise[:, None]], 1) > 0
    kinds = (signs * torch.tensor([1, 2, 4])).sum(1)
    bias = sum(float((used - fresh)[kinds == kind].mean(0).square().sum() * (kinds == kind).sum()) for kind in range(8))
    assert float(found.bias.mean()) == pytest.approx(bias / 4096 / 2, rel=0.1)


def test_what_the_steps_and_the_dense_optimizer_do_is_measured():
    problem = Problem((1,), "quadratic", c=0.5)
    lr, table, dense = 0.2, 2.0, 2.0
    found = simulate(problem, lr=lr, delay=0, steps=1, seeds=1, start=2.0)
    slope = table + 0.5 * dense
    assert float(found.step) == pytest.approx(2 * slope**2)
    assert float(found.weighted_step) == pytest.approx(slope**2)
    assert float(found.table_gradient) == pytest.approx(slope**2)
    table -= lr * slope
    gain = (0.5 * table * (dense - lr * slope) + (dense - lr * slope) ** 2 / 2) - (0.5 * table * dense + dense**2 / 2)
    assert float(found.dense_change) == pytest.approx(gain)
    # Adam's first step is its learning rate, 0.01, against the sign of the gradient.
    adam = simulate(problem, lr=lr, delay=0, steps=1, seeds=1, start=2.0, dense_optimizer="adam")
    assert float(adam.step) == pytest.approx(slope**2 + (0.01 / lr) ** 2)


def test_the_alignment_is_the_product_of_bias_and_step():
    found = simulate(QUIET, lr=0.2, delay=1, steps=2, seeds=1, start=2.0)
    assert float(found.alignment) == pytest.approx((2.0 - 1.6) * 2.0 / 2)


def test_a_mean_has_its_standard_error():
    found = mean(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    assert found.value == 3.0
    assert found.error == pytest.approx(math.sqrt(14 / 3 / 4))
