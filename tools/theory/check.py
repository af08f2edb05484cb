"""Compare every bound of docs/theory with runs, and write the tables and figures of docs/theory/check.md.

Run `python -m tools.theory.check` in the root of the repository; the part of the page before the mark is kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tools.theory import bounds
from tools.theory.problem import Constants, Problem, constants
from tools.theory.simulate import DenseOptimizer, Mean, Measured, mean, simulate
from turbogr.files import replace_text
from turbogr.plot import Axis, Series, line_chart

MARK = "<!-- written by `python -m tools.theory.check` from here on -->\n"
DOCS = Path(__file__).parents[2] / "docs" / "theory"
DELAYS = (0, 1, 2, 5)


@dataclass(frozen=True)
class Scale:
    """How much to run: the steps of a run and the number of seeds."""

    steps: int = 2000
    seeds: int = 64


@dataclass(frozen=True)
class Outcome:
    """One comparison: a theorem's two sides for a problem and a delay; `stale` is what the delay adds to the bound."""

    problem: str
    delay: int
    measured: Mean
    bound: float
    stale: float

    @property
    def ratio(self) -> float:
        return self.bound / self.measured.value

    @property
    def holds(self) -> bool:
        """Whether the measurement is within the bound, up to four standard errors."""
        return self.measured.value - 4 * self.measured.error <= self.bound


def even(size: int) -> Problem:
    """Return the quadratic problem of α = 1 / size for which Theorem 2 without delay is an equality."""
    return Problem((size,) * 4, "quadratic", mu=1 / size, row_noise=1.0)


def coupled(size: int) -> Problem:
    """Return a quadratic problem of α = 1 / size in which rows and the dense parameter interact."""
    return Problem((size,) * 4, "quadratic", c=0.35, row_noise=1.0, dense_noise=1.0)


def periodic(slots: tuple[int, ...], noise: float) -> Problem:
    """Return a problem that is not convex, with bounded gradients."""
    return Problem(slots, "periodic", c=0.35, row_noise=noise, dense_noise=noise)


def start_loss(problem: Problem, start: float) -> float:
    """Return f where all parameters equal `start`, which is Δ since the minimum is 0."""
    table = torch.full((1, problem.num_rows), start, dtype=torch.float64)
    return float(problem.loss(table, table[:, 0]))


def check_scheduled(
    problem: Problem, name: str, delay: int, lr: float, scale: Scale
) -> tuple[Outcome, Outcome, Measured]:
    """Compare Theorems 2 and 3 with the same runs from the origin; also return what was measured."""
    k = constants(problem)
    found = simulate(problem, lr=lr, delay=delay, steps=scale.steps, seeds=scale.seeds)
    weight = bounds.view_weight(k, lr=lr, delay=delay)

    def theorem2(delay: int) -> float:
        return bounds.scheduled(k, delta=0.0, lr=lr, delay=delay, steps=scale.steps)

    def theorem3(delay: int) -> float:
        return bounds.convex(k, distance=0.0, lr=lr, delay=delay, steps=scale.steps)

    sides = mean(found.gradient + weight * found.view_gradient)
    return _compare(name, delay, sides, theorem2), _compare(name, delay, mean(found.loss), theorem3), found


def check_any_delays(problem: Problem, name: str, delay: int, lr: float, start: float, scale: Scale) -> Outcome:
    """Compare Theorem 1 with runs whose delays depend on the batch."""
    k, delta = constants(problem), start_loss(problem, start)
    runs = {"steps": scale.steps, "seeds": scale.seeds}
    found = simulate(problem, lr=lr, delay=delay, start=start, delays="adversarial", **runs)

    def theorem1(delay: int) -> float:
        return bounds.any_delays(k, delta=delta, lr=lr, delay=delay, steps=scale.steps)

    return _compare(name, delay, mean(found.gradient), theorem1)


@dataclass(frozen=True)
class AdagradRun:
    """A problem, where all its parameters start, and Adagrad's settings."""

    problem: Problem
    name: str
    lr: float
    eps: float
    start: float


def check_adagrad(run: AdagradRun, delay: int, scale: Scale) -> Outcome:
    """Compare Theorem 4 with runs."""
    problem, k, delta = run.problem, constants(run.problem), start_loss(run.problem, run.start)
    found = _adagrad_runs(run, delay, scale)

    def theorem4(delay: int) -> float:
        probs = problem.probs.tolist()
        return bounds.adagrad(k, probs, delta=delta, lr=run.lr, eps=run.eps, delay=delay, steps=scale.steps)

    return _compare(run.name, delay, mean(found.view_gradient), theorem4)


def check_table(run: AdagradRun, delay: int, scale: Scale) -> Outcome:
    """Compare Theorem 4′ with runs in which Adam updates the dense parameter; J is measured in these runs."""
    problem, k = run.problem, constants(run.problem)
    found = _adagrad_runs(run, delay, scale, "adam")
    delta = start_loss(problem, run.start) + scale.steps * mean(found.dense_change).value

    def theorem(delay: int) -> float:
        probs = problem.probs.tolist()
        return bounds.adagrad_table(k, probs, delta=delta, lr=run.lr, eps=run.eps, delay=delay, steps=scale.steps)

    return _compare(run.name, delay, mean(found.table_gradient), theorem)


def check_bounded_steps(size: int, delay: int, scale: Scale) -> Outcome:
    """Compare Theorem 5 with the first steps of Adagrad, in which rare rows change at most once."""
    problem, lr = Problem((size,) * 4, "periodic", row_noise=0.5), 0.05
    found = simulate(problem, lr=lr, delay=delay, steps=min(40, scale.steps), seeds=scale.seeds, optimizer="adagrad")

    def theorem5(delay: int) -> float:
        return bounds.bounded_steps(constants(problem), problem.probs.tolist(), lr, delay=delay)

    return _compare(f"α = {1 / size:.2g}", delay, mean(found.bias), theorem5)


def _adagrad_runs(run: AdagradRun, delay: int, scale: Scale, dense: DenseOptimizer = "same") -> Measured:
    return simulate(
        run.problem,
        lr=run.lr,
        delay=delay,
        steps=scale.steps,
        seeds=scale.seeds,
        start=run.start,
        optimizer="adagrad",
        dense_optimizer=dense,
        eps=run.eps,
    )


def _compare(name: str, delay: int, measured: Mean, bound: Callable[[int], float]) -> Outcome:
    return Outcome(name, delay, measured, bound(delay), bound(delay) - bound(0))


def popularity(num_items: int, draws: int) -> tuple[float, float, float]:
    """Return (rows read, α, collision rate) of batches of `draws` independent ids with Zipf's law over the items."""
    weight = 1 / torch.arange(1, num_items + 1, dtype=torch.float64)
    probs = -torch.expm1(draws * torch.log1p(-weight / weight.sum()))
    return float(probs.sum()), float(probs.max()), float(probs.square().sum() / probs.sum())


def _table(title: str, outcomes: Iterable[Outcome]) -> str:
    lines = [
        f"### {title}",
        "",
        "| problem | τ | measured | bound | stale part | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        measured = f"{one.measured.value:.4g} ± {one.measured.error:.1g}"
        lines.append(
            f"| {one.problem} | {one.delay} | {measured} | {one.bound:.4g} | {one.stale:.3g} | {one.ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _popularity_table() -> str:
    lines = [
        "### Popular items",
        "",
        "A catalogue of a million items, ids drawn independently with probabilities proportional to 1 / rank:",
        "",
        "| ids in a batch | rows read | α | collision rate χ |",
        "|---|---|---|---|",
    ]
    for draws in (100, 1_000, 10_000, 100_000, 1_000_000):
        rows, alpha, rate = popularity(1_000_000, draws)
        lines.append(f"| {draws:,} | {rows:,.0f} | {alpha:.4f} | {rate:.3f} |")
    return "\n".join(lines) + "\n"


def _delay_figure(outcomes: Sequence[Outcome]) -> str:
    series = []
    for slot, name in enumerate(dict.fromkeys(one.problem for one in outcomes)):
        rows = [one for one in outcomes if one.problem == name]
        without = rows[0].bound
        delays = [float(one.delay) for one in rows]
        series.append(Series(f"{name}, bound", delays, [one.bound / without for one in rows], slot=2 * slot))
        series.append(
            Series(f"{name}, measured", delays, [one.measured.value / without for one in rows], slot=2 * slot + 1)
        )
    return line_chart(
        series,
        title="Theorem 2 over the delay, relative to its bound without delay",
        x=Axis("delay τ", integer=True),
        y=Axis("squared gradient norms", zero=True),
        height=340,
    )


def _alpha_figure(bias: dict[tuple[int, int], float], bias_bounds: dict[tuple[int, int], float]) -> str:
    delays = sorted({delay for delay, _ in bias})
    series = []
    for slot, delay in enumerate(delays):
        sizes = sorted({size for one, size in bias if one == delay}, reverse=True)
        alphas = [1 / size for size in sizes]
        series.append(Series(f"τ = {delay}, bound", alphas, [bias_bounds[delay, q] for q in sizes], slot=2 * slot))
        series.append(Series(f"τ = {delay}, measured", alphas, [bias[delay, q] for q in sizes], slot=2 * slot + 1))
    return line_chart(
        series,
        title="Bias of stale reads, relative to the bound without delay",
        x=Axis("α", log=True),
        y=Axis("mean of ‖∇f(x̂) − ∇f(x)‖²", log=True),
        height=340,
    )


def bias_bound(k: Constants, view_gradient: float, *, lr: float, delay: int) -> float:
    """Return the bound on the mean of E‖b_t‖² in the proof of Theorem 2, given the mean of E‖∇f(x̂_t)‖²."""
    return 2 * (k.kappa * lr) ** 2 * delay * ((delay + k.growth) * view_gradient + k.variance)


def _even_runs(scale: Scale) -> tuple[list[tuple[Outcome, Outcome]], str]:
    """Return the outcomes of Theorems 2 and 3 on the even problems, and the figure of the bias over α."""
    lr = bounds.largest_lr(constants(even(1)), max(DELAYS))
    outcomes, bias, bias_bounds = [], {}, {}
    for size in tqdm((1, 3, 10, 30, 100), "even"):
        k = constants(even(size))
        noise = k.smoothness * lr * k.variance
        for delay in DELAYS:
            *both, found = check_scheduled(even(size), f"even, α = {k.alpha:.2g}", delay, lr, scale)
            outcomes.append((both[0], both[1]))
            if delay in (1, 5):
                bias[delay, size] = mean(found.bias).value / noise
                bias_bounds[delay, size] = bias_bound(k, mean(found.view_gradient).value, lr=lr, delay=delay) / noise
    return outcomes, _alpha_figure(bias, bias_bounds)


def _coupled_runs(scale: Scale) -> list[tuple[Outcome, Outcome]]:
    outcomes = []
    for size in tqdm((1, 10, 100), "coupled"):
        lr = bounds.largest_lr(constants(coupled(size)), max(DELAYS))
        for delay in DELAYS:
            outcomes.append(check_scheduled(coupled(size), f"coupled, α = {1 / size:.2g}", delay, lr, scale)[:2])
    return outcomes


_NAMES = {(1,) * 4: "α = 1", (10,) * 4: "α = 0.1", (100,) * 4: "α = 0.01", (1, 10, 100, 100): "one popular row"}


def _any_delay_runs(scale: Scale) -> list[Outcome]:
    cases = [(periodic(slots, 1.0), name, delay) for slots, name in _NAMES.items() for delay in DELAYS]
    return [check_any_delays(*case, 0.02, 1.5, scale) for case in tqdm(cases, "SGD")]


def nearly_sgd(steps: int) -> AdagradRun:
    """Return a run without noise whose ε is so large that Adagrad's step hardly shrinks, and that converges."""
    return AdagradRun(Problem((1,), "periodic"), "one row, no noise, large ε", 12_000 / steps, 1000.0, 2.5)


def _adagrad_outcomes(scale: Scale) -> tuple[list[Outcome], list[Outcome]]:
    """Return the outcomes of Theorem 4 and of Theorem 4′."""
    quiet = Problem((1,), "periodic", row_noise=0.05, dense_noise=0.05)
    runs = [nearly_sgd(scale.steps), AdagradRun(quiet, "one row, little noise", 0.03, 0.1, 2.5)]
    runs += [AdagradRun(periodic(slots, 0.5), name, 0.1, 1e-8, 1.5) for slots, name in _NAMES.items()]
    cases = [(run, delay) for run in runs for delay in DELAYS]
    whole = [check_adagrad(run, delay, scale) for run, delay in tqdm(cases, "Adagrad")]
    return whole, [check_table(run, delay, scale) for run, delay in tqdm(cases, "Adagrad and Adam")]


def run(scale: Scale, out: Path) -> list[Outcome]:
    """Run all comparisons, write `check.md` (from its mark on) and the figures into `out`, and return the outcomes.

    Raises:
        ValueError: `out`/check.md has no mark.
    """
    page = out / "check.md"
    if MARK not in page.read_text(encoding="utf-8"):
        raise ValueError(f"{page} must contain the line {MARK.strip()!r}")
    even_pairs, alpha_figure = _even_runs(scale)
    smooth, convex = zip(*even_pairs, *_coupled_runs(scale), strict=True)
    sgd = _any_delay_runs(scale)
    adagrad, table = _adagrad_outcomes(scale)
    shared = [check_bounded_steps(size, delay, scale) for size in (1, 10, 200) for delay in DELAYS[1:]]
    shown = [one for one in smooth if one.problem in ("even, α = 1", "even, α = 0.33", "even, α = 0.1")]
    replace_text(out / "delay.svg", _delay_figure(shown))
    replace_text(out / "alpha.svg", alpha_figure)
    parts = [
        f"{scale.steps:,} steps, {scale.seeds} seeds.\n",
        "![both sides of Theorem 2 over the delay](delay.svg)\n",
        "![bias of stale reads over α](alpha.svg)\n",
        _table("Theorem 1: SGD on periodic problems, delays that depend on the batch", sgd),
        _table("Theorem 2: SGD, scheduled delays", smooth),
        _table("Theorem 3: SGD, scheduled delays, convex: mean loss above the minimum", convex),
        _table("Theorem 4: Adagrad on periodic problems", adagrad),
        _table("Theorem 4′: Adagrad on the table, Adam on the dense parameter: the table's gradient", table),
        _table("Theorem 5: bias of stale reads in the first steps of Adagrad", shared),
        _popularity_table(),
    ]
    text = page.read_text(encoding="utf-8").partition(MARK)[0]  # read now: it may have changed during the runs
    replace_text(page, text + MARK + "\n" + "\n".join(parts))
    return [*sgd, *smooth, *convex, *adagrad, *table, *shared]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; return 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tools.theory.check", description=__doc__)
    parser.add_argument("--steps", type=int, default=Scale.steps)
    parser.add_argument("--seeds", type=int, default=Scale.seeds)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of check.md")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.seeds < 2:
        parser.error(f"needs at least one step and two seeds, got {options.steps} and {options.seeds}")
    outcomes = run(Scale(options.steps, options.seeds), options.out)
    violated = [one for one in outcomes if not one.holds]
    for one in violated:
        print(f"{one.problem}, τ = {one.delay}: measured {one.measured.value:.4g} above the bound {one.bound:.4g}")
    print(f"{len(outcomes) - len(violated)} of {len(outcomes)} bounds hold; see {options.out / 'check.md'}")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
