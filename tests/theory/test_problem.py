"""The constants that the bounds are computed from are those of the problems."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tools.theory.problem import Batch, Problem, constants

QUADRATIC = Problem((1, 3, 5), "quadratic", a=1.3, c=0.5, mu=0.9, row_noise=0.7, dense_noise=0.4)
PERIODIC = Problem((1, 3, 5), "periodic", a=1.3, c=0.5, mu=0.9, row_noise=0.7, dense_noise=0.4)
BOTH = pytest.mark.parametrize("problem", [QUADRATIC, PERIODIC], ids=lambda problem: problem.shape)


def all_batches(problem):
    """Return every possible batch once, all equally likely, one per seed."""
    starts = [sum(problem.slots[:place]) for place in range(len(problem.slots))]
    picks = itertools.product(*(range(first, first + size) for first, size in zip(starts, problem.slots, strict=True)))
    signs = list(itertools.product((-1.0, 1.0), repeat=len(problem.slots) + 1))
    cases = [(rows, noise) for rows in picks for noise in signs]
    rows = torch.tensor([rows for rows, _ in cases])
    noise = torch.tensor([noise for _, noise in cases], dtype=torch.float64)
    return Batch(rows, noise[:, 1:] * problem.row_noise, noise[:, 0] * problem.dense_noise)


def sampled(problem, table, dense):
    """Return the gradient of every batch, [batches, V + 1], at one point."""
    batch = all_batches(problem)
    count = len(batch.rows)
    table, dense = table.expand(count, -1), dense.expand(count)
    rows, slope = problem.sample_gradient(table.gather(1, batch.rows), dense, batch)
    whole = torch.zeros(count, problem.num_rows, dtype=torch.float64).scatter_(1, batch.rows, rows)
    return torch.cat([whole, slope[:, None]], 1)


def points(problem, count=200, spread=2.0):
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(count, problem.num_rows + 1, generator=generator, dtype=torch.float64) * spread
    return drawn[:, :-1], drawn[:, -1]


def gradient(problem, table, dense):
    rows, slope = problem.gradient(table, dense)
    return torch.cat([rows, slope[:, None]], 1)


@BOTH
def test_the_gradient_is_that_of_the_loss_and_the_mean_over_batches(problem):
    table, dense = points(problem, 3)
    table, dense = table.requires_grad_(), dense.requires_grad_()
    wanted = torch.autograd.grad(problem.loss(table, dense).sum(), (table, dense))
    found = gradient(problem, table, dense)
    torch.testing.assert_close(found, torch.cat([wanted[0], wanted[1][:, None]], 1))
    for place in range(3):
        mean = sampled(problem, table[place : place + 1], dense[place : place + 1]).mean(0)
        torch.testing.assert_close(mean, found[place])


@BOTH
def test_the_loss_is_never_below_zero_and_zero_at_the_origin(problem):
    assert problem.loss(*points(problem, 2000)).min() >= 0
    assert problem.loss(torch.zeros(1, problem.num_rows).double(), torch.zeros(1).double()) == 0


def test_a_problem_whose_least_loss_is_unknown_is_refused():
    with pytest.raises(ValueError, match="at most"):
        Problem((2, 2), "quadratic", c=0.8)


@BOTH
def test_drawn_batches_are_like_all_batches(problem):
    batch = problem.draw(20_000, torch.Generator().manual_seed(0))
    counts = torch.bincount(batch.rows.flatten(), minlength=problem.num_rows) / 20_000
    torch.testing.assert_close(counts.double(), problem.probs, atol=0.02, rtol=0)
    assert set(batch.row_noise.flatten().tolist()) == {-0.7, 0.7}
    assert abs(float(batch.row_noise.mean())) < 0.02
    assert set(batch.dense_noise.tolist()) == {-0.4, 0.4}


@BOTH
def test_the_variance_is_within_its_bound_and_the_bound_is_needed(problem):
    k = constants(problem)
    shares = []
    table, dense = points(problem)
    if problem.shape == "quadratic":  # where the rarest rows pull the dense parameter in all directions
        table[0], dense[0] = torch.tensor([0.0, 0, 0, 0, 90, -90, 90, -90, 0]), 0.0
    if problem.shape == "periodic":  # where rows have their steepest slope, or half a slot pulls against the other
        table[0], dense[0] = math.pi / 2, 0.0
        table[1], dense[1] = torch.tensor([1.0, 1, -1, 1, 1, -1, 1, -1, 1]) * math.pi / 2, 0.0
    for place in range(len(table)):
        grads = sampled(problem, table[place : place + 1], dense[place : place + 1])
        mean = grads.mean(0)
        allowed = k.variance + k.growth * float(mean.square().sum())
        shares.append(float((grads - mean).square().sum(1).mean()) / allowed)
    origin = sampled(problem, torch.zeros(1, problem.num_rows).double(), torch.zeros(1).double())
    shares.append(float(origin.square().sum(1).mean()) / k.variance)
    assert max(shares) <= 1 + 1e-9
    assert max(shares) > (0.999 if problem.shape == "quadratic" else 0.85)


@BOTH
def test_the_smoothness_bounds_the_hessian(problem):
    k = constants(problem)
    table, dense = points(problem, 10)
    norms = []
    for place in range(len(table)):
        at = torch.cat([table[place], dense[place : place + 1]])
        hessian = torch.autograd.functional.hessian(lambda x: problem.loss(x[None, :-1], x[-1:]).sum(), at)
        norms.append(float(torch.linalg.eigvalsh(hessian).abs().max()))
    assert max(norms) <= k.smoothness + 1e-9
    assert max(norms) > (0.999 if problem.shape == "quadratic" else 0.5) * k.smoothness


@BOTH
def test_lemma_1_bounds_the_change_of_the_mean_gradient(problem):
    k = constants(problem)
    table, dense = points(problem)
    change = points(problem, spread=0.3)[0].flip(0)
    difference = gradient(problem, table + change, dense) - gradient(problem, table, dense)
    weighted = (change.square() * problem.probs).sum(1)
    assert (difference[:, :-1].square().sum(1) <= k.alpha * k.row_lipschitz**2 * weighted + 1e-12).all()
    assert (difference[:, -1].square() <= k.dense_lipschitz**2 * weighted + 1e-12).all()
    assert (difference.square().sum(1) <= k.kappa**2 * change.square().sum(1) + 1e-12).all()


@pytest.mark.parametrize("size", [1, 4, 20])
def test_lemma_1_is_an_equality_where_slots_are_alike(size):
    problem = Problem((size,) * 3, "quadratic", c=0.5)
    table, dense = points(problem, 1)
    difference = gradient(problem, table + 0.1, dense) - gradient(problem, table, dense)
    moved = 0.1**2 * problem.num_rows
    assert float(difference.square().sum()) == pytest.approx(constants(problem).kappa ** 2 * moved)


def test_the_gradients_of_the_periodic_problem_are_bounded():
    k = constants(PERIODIC)
    table, dense = points(PERIODIC, 200)
    grads = torch.stack([sampled(PERIODIC, table[i : i + 1], dense[i : i + 1]) for i in range(200)])
    assert 0.8 * k.row_range < grads[..., :-1].abs().max() <= k.row_range
    assert 0.7 * k.dense_range < grads[..., -1].abs().max() <= k.dense_range
    squares = grads.square()
    assert squares.sum(-1).max() <= k.second_moment
    assert squares[..., :-1].sum(-1).max() <= k.table_moment
    assert (squares[..., :-1] * PERIODIC.probs).sum(-1).mean(1).max() <= k.weighted_moment


def test_the_weighted_moment_is_the_collision_rates_share_of_the_tables():
    k = constants(PERIODIC)
    probs = PERIODIC.probs
    assert k.collision_rate == pytest.approx(float(probs.square().sum() / probs.sum()))
    assert k.weighted_moment == pytest.approx(k.collision_rate * k.table_moment)
