"""Runs stay within the theorems' bounds, and slightly smaller bounds are refuted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tools.theory import bounds
from tools.theory.adam_example import MEAN_SLOPE, last_values
from tools.theory.check import (
    AdagradRun,
    Outcome,
    Scale,
    bias_bound,
    check_adagrad,
    check_any_delays,
    check_bounded_steps,
    check_scheduled,
    check_table,
    coupled,
    even,
    nearly_sgd,
    periodic,
    start_loss,
)
from tools.theory.problem import Problem, constants
from tools.theory.simulate import Mean, mean, simulate
from turbogr.ops import row_adam_

SCALE = Scale(steps=250, seeds=512)
LR = 0.12


def refuted(measured: Mean, bound: float) -> bool:
    """Whether a measurement lies above a bound by more than the standard error explains."""
    return measured.value - 4 * measured.error > bound


@pytest.fixture(scope="module")
def fast():
    """Return runs on the even problem with α = 1, by delay."""
    return {delay: check_scheduled(even(1), "even", delay, LR, SCALE) for delay in (0, 1, 2, 5)}


def test_theorem_2_holds_and_is_sharp_without_delay(fast):
    outcome = fast[0][0]
    assert outcome.holds
    assert 0.98 < outcome.ratio < 1.05
    assert refuted(outcome.measured, outcome.bound / 1.05)


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_theorem_2_holds_within_a_small_factor_with_delay(fast, delay):
    outcome = fast[delay][0]
    assert outcome.holds
    assert outcome.ratio < 2.2


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_theorem_2_with_a_quarter_of_its_stale_term_is_refuted(fast, delay, factor):
    arguments = {"delta": 0.0, "lr": LR, "delay": delay, "steps": SCALE.steps}
    assert refuted(fast[delay][0].measured, bounds.scheduled(constants(even(1)), stale_factor=factor, **arguments))


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_theorem_3_holds_within_a_small_factor(fast, delay):
    outcome = fast[delay][1]
    assert outcome.holds
    assert outcome.ratio < 2.5
    assert refuted(outcome.measured, outcome.bound / 3)


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_the_bias_of_stale_reads_follows_the_proof_at_every_alpha(fast, delay):
    for size in (1, 10):
        k = constants(even(size))
        found = fast[delay][2] if size == 1 else simulate(even(size), lr=LR, delay=delay, steps=150, seeds=64)
        bound = bias_bound(k, mean(found.view_gradient).value, lr=LR, delay=delay)
        assert 1 < bound / mean(found.bias).value < 4.5


def test_the_stale_term_of_the_coupled_problem_fades_with_alpha():
    shares = []
    for size in (1, 10, 100):
        k = constants(coupled(size))
        arguments = {"delta": 0.0, "lr": bounds.largest_lr(k, 5), "steps": 300}
        shares.append(bounds.scheduled(k, delay=5, **arguments) / bounds.scheduled(k, delay=0, **arguments) - 1)
    assert shares[0] > 0.5
    assert shares[1] < shares[0] / 10
    assert shares[2] < shares[1] / 10


@pytest.mark.parametrize("size", [1, 10])
def test_theorems_2_and_3_hold_on_the_coupled_problem(size):
    lr = bounds.largest_lr(constants(coupled(size)), 5)
    for outcome in check_scheduled(coupled(size), "coupled", 5, lr, replace(SCALE, seeds=64))[:2]:
        assert outcome.holds
        assert outcome.ratio < 10


@pytest.mark.parametrize("slots", [(1, 1, 1, 1), (1, 10, 100, 100)])
def test_theorem_1_holds_for_delays_that_depend_on_the_batch(slots):
    outcome = check_any_delays(periodic(slots, 1.0), "periodic", 5, 0.02, 1.5, replace(SCALE, seeds=32))
    assert outcome.holds
    assert refuted(outcome.measured, outcome.bound / 6)


def test_theorem_2_holds_with_a_delay_for_every_row():
    k = constants(even(1))
    found = simulate(even(1), lr=LR, delay=5, steps=250, seeds=64, delays="scattered")
    sides = mean(found.gradient + bounds.view_weight(k, lr=LR, delay=5) * found.view_gradient)
    assert not refuted(sides, bounds.scheduled(k, delta=0.0, lr=LR, delay=5, steps=250))


@pytest.mark.parametrize("delay", [1, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_the_drift_and_its_alignment_are_within_the_proofs_bounds_and_attain_them(optimizer, delay):
    """Inequality (3), with which Theorem 1 counts too, and what the proof of Theorem 4 does with it."""
    problem = Problem((1, 1), "quadratic", c=0.5)
    k, eps = constants(problem), 100.0
    lr = 0.002 if optimizer == "sgd" else 0.002 * eps
    found = simulate(problem, lr=lr, delay=delay, steps=400, seeds=1, start=2.0, optimizer=optimizer, eps=eps)
    shares = float(found.bias) / bounds.drift(k, float(found.weighted_step), lr=lr, delay=delay)
    assert 0.98 < shares <= 1
    both = math.sqrt(float(found.weighted_step) * float(found.step))
    assert 0.97 < float(found.alignment) / (math.sqrt(k.gamma) * lr * delay * both) <= 1


@pytest.mark.parametrize("slots", [(1,) * 4, (10,) * 4, (1, 10, 100, 100)])
def test_the_bias_of_delays_that_depend_on_the_batch_is_within_that_of_theorem_1(slots):
    problem = periodic(slots, 1.0)
    k = constants(problem)
    found = simulate(problem, lr=0.1, delay=3, steps=60, seeds=64, start=1.5, delays="adversarial")
    assert 0 < mean(found.bias).value <= bounds.drift(k, mean(found.weighted_step).value, lr=0.1, delay=3)
    assert mean(found.bias).value <= bounds.bounded_steps(k, problem.probs.tolist(), 0.1 * k.row_range, delay=3)


def test_rare_rows_of_bounded_gradients_make_the_bias_linear_in_the_delay():
    problem = Problem((40,) * 4, "periodic")
    k, lr, delay = constants(problem), 0.002, 8
    found = simulate(problem, lr=lr, delay=delay, steps=150, seeds=128, start=math.pi / 4)
    bound = bounds.bounded_steps(k, problem.probs.tolist(), lr * k.row_range, delay=delay)
    # At π/4 a row's slope and its change are both 1/√2 of their largest, which makes 1/4 of the square of the product.
    assert 3.5 < bound / mean(found.bias).value < 4.5
    assert bounds.drift(k, k.weighted_moment, lr=lr, delay=delay) > 6 * bound


SLOPE = AdagradRun(Problem((1,), "periodic", row_noise=0.05, dense_noise=0.05), "slope", 0.03, 0.1, 2.5)
RARE = AdagradRun(periodic((1, 10, 100, 100), 0.5), "rare", 0.1, 1e-8, 1.5)
SHORT = Scale(steps=600, seeds=2)


@pytest.mark.parametrize("check", [check_adagrad, check_table])
@pytest.mark.parametrize(("delay", "factor"), [(0, 2.25), (1, 2.6), (5, 3.8)])
def test_theorems_4_hold_within_a_small_factor(check, delay, factor):
    outcome = check(nearly_sgd(SHORT.steps), delay, SHORT)
    assert outcome.holds
    assert refuted(outcome.measured, outcome.bound / factor)


@pytest.mark.parametrize("check", [check_adagrad, check_table])
def test_theorems_4_hold_where_the_steps_shrink(check):
    outcome = check(SLOPE, 5, SHORT)
    assert outcome.holds
    assert refuted(outcome.measured, outcome.bound / 12)
    assert check(RARE, 5, Scale(steps=100, seeds=16)).holds


@pytest.mark.parametrize("run", [nearly_sgd(SHORT.steps), SLOPE], ids=["large", "small"])
def test_theorem_4_bounds_the_gradient_at_the_current_parameters_too(run):
    problem, k, steps = run.problem, constants(run.problem), SHORT.steps
    for delay in (1, 5):
        found = simulate(
            problem, lr=run.lr, delay=delay, steps=steps, seeds=2, start=run.start, optimizer="adagrad", eps=run.eps
        )
        arguments = {"delta": start_loss(problem, run.start), "lr": run.lr, "eps": run.eps}
        bound = bounds.adagrad_current(k, problem.probs.tolist(), delay=delay, steps=steps, **arguments)
        assert mean(found.gradient).value <= bound
        assert mean(found.gradient).value > bound / (7 if run.eps > 1 else 20)


@pytest.mark.parametrize("size", [1, 5])
def test_lemma_4_bounds_the_sum_of_squared_steps_and_is_attained(size):
    problem = Problem((size,), "periodic", a=1e-3, row_noise=1.0)
    steps, eps = 300, 1000.0
    found = simulate(problem, lr=0.01, delay=0, steps=steps, seeds=64, optimizer="adagrad", eps=eps)
    allowed = sum(bounds.log_sums(constants(problem), problem.probs.tolist(), eps=eps, steps=steps)[0])
    row_log_sums = steps * size * mean(found.weighted_step).value  # all probs are 1 / size
    assert 0.95 < row_log_sums / allowed <= 1


def test_a_measurement_above_its_bound_does_not_hold():
    assert not Outcome("", 1, Mean(1.0, 0.01), 0.9, 0.0).holds
    assert Outcome("", 1, Mean(1.0, 0.03), 0.9, 0.0).holds


def lemma_3(rng, noise_factor, trials=20_000):
    """Return the least of E[ḡg/D] + factor √ν E[g²/D²] − ḡ²/(2D̃), in units of ḡ²/D̃, over two-point distributions."""
    prob = 10 ** rng.uniform(-4, 0, trials) / 2
    probs = np.stack([prob, 1 - prob])
    g = rng.choice([-1, 1], (2, trials)) * 10 ** rng.uniform(-3, 2, (2, trials))
    s = np.where(rng.random(trials) < 0.3, 0.0, 10 ** rng.uniform(-4, 4, trials))
    eps = 10 ** rng.uniform(-8, 0, trials)
    mean_g, square = (probs * g).sum(0), (probs * g**2).sum(0)
    used, smooth = np.sqrt(s + g**2) + eps, np.sqrt(s + square) + eps
    left = (probs * mean_g * g / used).sum(0) + noise_factor * np.sqrt(square) * (probs * g**2 / used**2).sum(0)
    return ((left * smooth / mean_g**2) - 0.5)[mean_g**2 > 1e-9 * square].min()


def test_lemma_3_holds_and_fails_with_a_tenth_of_its_noise_term():
    assert lemma_3(np.random.default_rng(0), 1.0) >= 0
    assert lemma_3(np.random.default_rng(0), 0.1) < 0


@pytest.mark.parametrize("delay", [0, 1, 3, 20])
@pytest.mark.parametrize("growth", [0.0, 7.0])
def test_the_largest_lr_is_allowed_by_theorems_2_and_3(delay, growth):
    k = replace(constants(coupled(5)), growth=growth)
    lr = bounds.largest_lr(k, delay)
    assert bounds.view_weight(k, lr=lr, delay=delay) >= 0
    convex = (1 + growth) * k.smoothness * lr
    convex += 2 * k.table_smoothness * k.smoothness * lr**2 * delay * (delay + growth)
    assert convex <= 1 + 1e-12


@pytest.mark.parametrize("steps", [10, 1000, 10**6])
def test_the_corollary_follows_from_theorem_2(steps):
    k, delta, delay = constants(coupled(4)), 3.0, 4
    limit = (1 + k.growth) * k.smoothness + k.kappa * math.sqrt(2 * delay * (delay + k.growth))
    usual = math.sqrt(2 * delta / (k.smoothness * k.variance * steps))
    stated = 2 * math.sqrt(2 * k.variance * k.smoothness * delta / steps)
    stated += 4 * k.kappa**2 * delta * delay / (k.smoothness * steps)
    stated += 2 * delta / steps * limit if usual > 1 / limit else 0.0
    assert bounds.scheduled(k, delta=delta, lr=min(1 / limit, usual), delay=delay, steps=steps) <= stated * (1 + 1e-12)


@pytest.mark.parametrize("delay", [0, 1, 2, 5, 20])
def test_delayed_descent_is_unstable_just_above_the_limit_that_the_page_names(delay):
    def growth(step):
        """Return the size of the largest root of z^(delay + 1) = z^delay − step."""
        polynomial = np.zeros(delay + 2)
        polynomial[:2], polynomial[-1] = (1, -1), polynomial[-1] + step
        if delay == 0:
            polynomial = np.array([1, step - 1])
        return np.abs(np.roots(polynomial)).max()

    limit = 2 * math.sin(math.pi / (4 * delay + 2))
    assert growth(0.99 * limit) < 1 < growth(1.01 * limit)
    assert 2 <= limit * (1 + math.sqrt(2) * delay) < 2.5


@pytest.mark.parametrize(("size", "delay", "factor"), [(1, 2, 12.0), (10, 2, 2.5), (200, 1, 1.2), (200, 5, 1.25)])
def test_theorem_5_bounds_the_bias_by_the_number_of_shared_rows(size, delay, factor):
    outcome = check_bounded_steps(size, delay, Scale(steps=12 if size < 200 else 40, seeds=256))
    assert outcome.holds
    assert refuted(outcome.measured, outcome.bound / factor)


def test_the_largest_step_of_adam_is_that_of_the_page():
    first, second, lr = 0.9, 0.98, 0.01
    limit = (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
    assert limit == pytest.approx(1.70, abs=0.005)
    generator = torch.Generator().manual_seed(0)
    weight, mean_, square = (torch.zeros(50, 4, dtype=torch.float64) for _ in range(3))
    largest = 0.0
    for step in range(1, 100):
        before = weight.clone()
        rows = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(49, generator=generator)[:20]])
        grad = torch.randn(21, 4, generator=generator, dtype=torch.float64)
        grad[0] = (second / first) ** step  # the gradients for which the proof's inequality is an equality
        row_adam_(weight, mean_, square, rows, grad, step=step, lr=lr, betas=(first, second), eps=1e-12)
        largest = max(largest, float((weight - before).abs().max()))
    assert 0.9 * limit * lr < largest <= limit * lr


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("eps", [0.1, 1.0])
def test_amsgrad_stays_within_its_bound(delay: int, eps: float) -> None:
    problem, lr, steps = periodic((3, 6), 0.5), 0.05, 200
    found = simulate(
        problem, lr=lr, delay=delay, steps=steps, seeds=256, start=1.0, optimizer="amsgrad", eps=eps,
        delays="scattered",
    )  # fmt: skip
    options = {"lr": lr, "eps": eps, "beta": 0.98, "delay": delay, "steps": steps}
    delta = start_loss(problem, 1.0)
    bound = bounds.amsgrad(constants(problem), problem.probs.tolist(), delta=delta, **options)
    assert not refuted(mean(found.gradient), bound)
    # The bias alone is within that of Theorem 5 for steps of at most 1 / sqrt(1 - beta).
    k, probs = constants(problem), problem.probs
    stale = k.gamma * lr**2 / 0.02 * delay * float((probs**2 * (1 + (delay - 1) * probs)).sum())
    assert not refuted(mean(found.bias), stale)
    if delay == 0:
        assert float(found.bias.max()) == 0
    else:
        assert float(found.bias.mean()) > 0, "reads are stale"


@pytest.mark.parametrize("delay", [0, 1])
def test_adam_climbs_where_adagrad_and_amsgrad_descend(delay: int) -> None:
    ends = {
        name: float(torch.cos(last_values(name, delay=delay, steps=4000, seeds=16)).mean())
        for name in ("adam", "adagrad", "amsgrad")
    }
    start = math.cos(1.0)
    assert MEAN_SLOPE > 0
    assert ends["adam"] < -0.5 < start < min(ends["adagrad"], ends["amsgrad"])
