"""Load balancing: how long ranks wait for the slowest one, with and without it, and how long planning takes.

Claim: reallocating sequences by cost removes most of the waiting, and planning a step takes little time.
Compared with: equal numbers of sequences per rank, in the order of the epoch.
Keys: `imbalance_before_W`, `imbalance_after_W` (% of the step waited on W ranks), `token_imbalance_*`,
`max_token_difference_*`, `plan_seconds_100k_1024`; `wait_share_before_N`, `wait_share_after_N` on N real processes.

Lengths are lognormal: like KuaiRand-27K (median 8,591, mean 11,796), cut off at `max_len`, and short ones like Amazon
reviews (keys `amazon_*`). Imbalance is the paper's: time waited ÷ time of the step. Costs are counted from the model
(or given as `cost`), so these figures are exact and the same on every machine. Then `ranks` processes train a small
model and time themselves. `turbogr bench balance --set learning_epochs=10` also trains on the built-in log with batches
of sequences and with batches of tokens (keys `learning_*`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from turbogr.bench._balance_learning import learning_curves
from turbogr.bench._balance_measured import lognormal, measured_waiting
from turbogr.bench._partition import karmarkar_karp, zigzag
from turbogr.bench.record import Cell, Result, Table
from turbogr.config import PRESETS, ModelConfig
from turbogr.data.balance import StepPlan, Strategy, contiguous_owners, plan_steps, wait_share
from turbogr.data.cost import CostModel, Float64Array
from turbogr.data.partition import assign, greedy
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, did_you_mean
from turbogr.models.flops import counted_cost
from turbogr.plot import Axis, Series, line_chart

SETTINGS: dict[str, Any] = {
    "worlds": [16, 128, 1024],
    "batch_size": 8,  # sequences per rank
    "max_len": 8192,
    "max_lens": [4096, 8192, 16384, 32768],  # compared on 16 ranks, with
    "batch_sizes": [2, 4, 8, 16],  # sequences per rank
    "median": 8591.0,
    "mean": 11796.0,
    "amazon_batch_size": 512,
    "sequences": 65536,  # used for each figure
    "preset": "long",  # HSTU preset whose FLOPs are the cost
    "cost": [],  # or a, b: a sequence of n tokens costs a·n + b·n²
    "ranks": 2,  # real processes whose waiting is measured; 0: none
    "measured_steps": 6,
    "learning_epochs": 0,
}

_NUM_NEGATIVES = 128
_SMALL_WORLD = 16


class Waiting(NamedTuple):
    """Means over steps: waiting in per cent by cost and by tokens, and max minus min tokens of a rank."""

    cost: float
    tokens: float
    token_difference: float
    plan_milliseconds: float


def run(settings: Mapping[str, Any]) -> Result:
    """Compare with and without balancing, by cost and on real processes."""
    cost = _cost(settings)
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    for world in settings["worlds"]:
        lengths = _kuairand(settings, settings["max_len"])
        options = {"world": world, "batch_size": world * settings["batch_size"]}
        _compare(figures, rows, "", f"KuaiRand-like, {world} ranks", lengths, cost, options)
    lengths = lognormal(settings["sequences"] * 8, 8.0, 14.0, 50)
    world, tokens = _SMALL_WORLD, int(_SMALL_WORLD * settings["amazon_batch_size"] * lengths.mean())
    options = {"world": world, "batch_size": world * settings["amazon_batch_size"]}
    _compare(figures, rows, "amazon_", f"Amazon-like, {world} ranks", lengths, cost, options)
    budget = waiting(plan_steps(lengths, world=world, batch_tokens=tokens, strategy="token-budget", cost=cost))
    rows.append([f"Amazon-like, {world} ranks, token-budget", *budget])
    figures["amazon_imbalance_token_budget_16"] = budget.cost
    figures["plan_seconds_100k_1024"] = _plan_seconds(settings, cost)
    columns = ["lengths, ranks, strategy", "waiting %", "by tokens %", "token difference", "planning ms per step"]
    size = f"{settings['batch_size']} sequences per rank, up to {settings['max_len']} tokens"
    tables = [
        Table(f"Waiting for the slowest rank, {size}", columns, rows),
        _methods(settings, cost),
        _sizes(settings, cost, figures),
        _robustness(settings, cost, figures),
    ]
    plots = {"balance": _plot(figures, settings["worlds"])}
    if settings["ranks"]:
        steps = settings["ranks"], settings["measured_steps"]
        tables.append(measured_waiting(*steps, settings["median"], settings["mean"], figures))
    if settings["learning_epochs"]:
        curves = learning_curves(settings["learning_epochs"])
        figures.update(curves.figures)
        tables.append(curves.table)
        plots["balance-learning"] = curves.plot
    return Result(figures, tables, plots, [f"cost of n tokens: {cost.a:.4g}·n + {cost.b:.4g}·n²"])


def waiting(plan: StepPlan, true_cost: CostModel | None = None) -> Waiting:
    """Return the means over all full steps of a plan; `true_cost` is what the ranks really take (default: the plan's).

    The last step, which may be smaller, is counted only if it is the only one.
    """
    started = time.perf_counter()
    steps = [plan[step] for step in range(max(1, len(plan) - 1))]
    seconds = (time.perf_counter() - started) / len(steps)
    costs = _loads(steps, (true_cost or plan.cost).cost(plan.lengths)) / plan.speeds
    tokens = _loads(steps, plan.lengths.astype(np.float64))
    difference = float((tokens.max(axis=1) - tokens.min(axis=1)).mean())
    return Waiting(100 * wait_share(costs), 100 * wait_share(tokens / plan.speeds), difference, 1e3 * seconds)


def _loads(steps: list[list[Int64Array]], weights: Float64Array) -> Float64Array:
    return np.array([[weights[part].sum() for part in step] for step in steps])


def _cost(settings: Mapping[str, Any]) -> CostModel:
    given = settings["cost"]
    if given:
        if len(given) != 2:
            raise UserError(f"cost takes two numbers a, b, got {given}")
        return CostModel(float(given[0]), float(given[1]))
    preset = settings["preset"]
    if preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS)
        raise UserError(f"preset: unknown '{preset}', choose from {', '.join(PRESETS)}.{hint}")
    return counted_cost(ModelConfig(preset=preset), _NUM_NEGATIVES)


def _kuairand(settings: Mapping[str, Any], longest: int) -> Int64Array:
    return lognormal(settings["sequences"], settings["median"], settings["mean"], longest)


def _compare(
    figures: dict[str, float],
    rows: list[list[Cell]],
    prefix: str,
    label: str,
    lengths: Int64Array,
    cost: CostModel,
    options: Mapping[str, Any],
) -> None:
    """Add the figures and table rows of both strategies."""
    strategies: dict[str, Strategy] = {"before": "none", "after": "reallocate"}
    for when, strategy in strategies.items():
        found = waiting(plan_steps(lengths, strategy=strategy, cost=cost, **options))
        world = options["world"]
        figures[f"{prefix}imbalance_{when}_{world}"] = found.cost
        figures[f"{prefix}token_imbalance_{when}_{world}"] = found.tokens
        figures[f"{prefix}max_token_difference_{when}_{world}"] = found.token_difference
        rows.append([f"{label}, {strategy}", *found])


def _plan_seconds(settings: Mapping[str, Any], cost: CostModel) -> float:
    """Return the median time to plan one step of 100,000 sequences for 1,024 ranks."""
    lengths = lognormal(100_000, settings["median"], settings["mean"], settings["max_len"])
    times = []
    for _ in range(5):
        started = time.perf_counter()
        plan_steps(lengths, world=1024, batch_size=len(lengths), strategy="reallocate", cost=cost)[0]
        times.append(time.perf_counter() - started)
    return median(times)


def _methods(settings: Mapping[str, Any], cost: CostModel) -> Table:
    """Compare methods that assign the sequences of the same steps to 16 ranks."""
    speeds = np.ones(_SMALL_WORLD)
    methods: dict[str, Callable[[Int64Array, Int64Array], Int64Array]] = {
        "equal numbers": lambda costs, _: contiguous_owners(len(costs), _SMALL_WORLD),
        "sorted, round robin": lambda costs, _: zigzag(costs, _SMALL_WORLD),
        "greedy (LPT)": lambda costs, _: greedy(costs, speeds),
        "Karmarkar-Karp": lambda costs, _: karmarkar_karp(costs, _SMALL_WORLD),
        "greedy, then exchanges": lambda costs, lengths: assign(costs, lengths, speeds),
    }
    rows: list[list[Cell]] = []
    for longest in (settings["max_len"], 4 * settings["max_len"]):
        size = _SMALL_WORLD * settings["batch_size"]
        batches = _kuairand(settings, longest)[: 64 * size].reshape(-1, size)
        for name, method in methods.items():
            rows.append([longest, name, *_measure_method(method, batches, cost)])
    columns = ["max_len", "method", "waiting %", "by tokens %", "token difference", "ms per step"]
    return Table(f"Methods to assign sequences to {_SMALL_WORLD} ranks, same steps", columns, rows)


def _measure_method(
    method: Callable[[Int64Array, Int64Array], Int64Array], batches: Int64Array, cost: CostModel
) -> Waiting:
    seconds, costs, tokens = 0.0, [], []
    for lengths in batches:
        whole = cost.whole_costs(lengths)
        started = time.perf_counter()
        owners = method(whole, lengths)
        seconds += time.perf_counter() - started
        costs.append(np.bincount(owners, weights=cost.cost(lengths), minlength=_SMALL_WORLD))
        tokens.append(np.bincount(owners, weights=lengths, minlength=_SMALL_WORLD))
    spread = np.ptp(np.array(tokens), axis=1).mean()
    shares = 100 * wait_share(np.array(costs)), 100 * wait_share(np.array(tokens))
    return Waiting(*shares, float(spread), 1e3 * seconds / len(batches))


def _sizes(settings: Mapping[str, Any], cost: CostModel, figures: dict[str, float]) -> Table:
    """Waiting on 16 ranks by the longest sequence and the number of sequences per rank."""
    rows: list[list[Cell]] = []
    for longest in settings["max_lens"]:
        for size in settings["batch_sizes"]:
            lengths = _kuairand(settings, longest)[: 64 * _SMALL_WORLD * size]
            options: dict[str, Any] = {"world": _SMALL_WORLD, "batch_size": _SMALL_WORLD * size, "cost": cost}
            before = waiting(plan_steps(lengths, strategy="none", **options))
            after = waiting(plan_steps(lengths, strategy="reallocate", **options))
            figures[f"imbalance_after_16_len{longest}_batch{size}"] = after.cost
            rows.append([longest, size, before.cost, after.cost, after.tokens, after.token_difference])
    columns = ["max_len", "sequences per rank", "waiting before %", "after %", "by tokens %", "token difference"]
    return Table(f"Waiting by the size of a step, {_SMALL_WORLD} ranks", columns, rows)


def _robustness(settings: Mapping[str, Any], cost: CostModel, figures: dict[str, float]) -> Table:
    """Waiting with devices of unequal speed, and with a wrong quadratic part of the cost model."""
    world = _SMALL_WORLD
    lengths = _kuairand(settings, settings["max_len"])[: 64 * world * settings["batch_size"]]
    options: dict[str, Any] = {"world": world, "batch_size": world * settings["batch_size"], "strategy": "reallocate"}
    speeds = [1.0] * (world // 2) + [0.5] * (world - world // 2)
    aware = waiting(plan_steps(lengths, cost=cost, speeds=speeds, **options)).cost
    plan = plan_steps(lengths, cost=cost, **options)
    steps = _loads(list(plan), cost.cost(lengths))
    unaware = 100 * wait_share(steps / np.array(speeds))
    figures["imbalance_unequal_after_16"], figures["imbalance_unequal_before_16"] = aware, unaware
    rows: list[list[Cell]] = [
        ["half of the ranks at half speed, unknown to the plan", unaware],
        ["half of the ranks at half speed, known (parallel.speeds)", aware],
    ]
    for factor in (0.5, 2.0):
        rows.append([f"b is {factor:g} times what was assumed", waiting(plan, CostModel(cost.a, factor * cost.b)).cost])
    by_tokens = plan_steps(lengths, cost=CostModel(), **options)
    rows.append(["planned by tokens only", waiting(by_tokens, cost).cost])
    return Table(f"Unequal devices and a wrong cost model, {world} ranks", ["case", "waiting %"], rows)


def _plot(figures: Mapping[str, float], worlds: list[int]) -> str:
    series = [
        Series(name, worlds, [figures[f"{key}_{world}"] for world in worlds])
        for name, key in (
            ("equal numbers of sequences", "imbalance_before"),
            ("balanced, by cost", "imbalance_after"),
            ("balanced, by tokens", "token_imbalance_after"),
        )
    ]
    return line_chart(
        series,
        title="Time waited for the slowest rank, KuaiRand-like lengths",
        x=Axis("ranks", log=True, format=lambda ranks: f"{ranks:,.0f}"),
        y=Axis("% of the step", log=True),
    )
