"""Measured waiting: processes that train a small model over gloo, with and without balancing.

Every rank times its own forward and backward between two barriers. The fastest of several repeats counts, because other
processes on the machine only make a repeat slower. Do not use more ranks than cores.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch

from turbogr.bench._journal import measured
from turbogr.bench._paper_rows import filled_lengths
from turbogr.bench._ranks import rank_main, run_as_ranks
from turbogr.bench.record import Cell, Table
from turbogr.config import Config, ModelConfig, resolve
from turbogr.data.balance import Strategy, plan_steps, share_step, wait_share
from turbogr.data.cost import CostModel, Float64Array
from turbogr.data.step_windows import plan_windows
from turbogr.data.vocabulary import Int64Array
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import World
from turbogr.training.cost_measurement import made_up_batch, measure_cost
from turbogr.training.step import Stepper

_BATCH_SIZE, _NUM_ITEMS, _MAX_LEN, _REPEATS = 8, 5000, 512, 5
_SCALE = 16  # lengths are KuaiRand's divided by this, so that a step on a CPU is short
_STRATEGIES: dict[str, Strategy] = {"before": "none", "after": "reallocate"}


def lognormal(num: int, median: float, mean: float, longest: int, seed: int = 0) -> Int64Array:
    """Return `num` lengths of a lognormal distribution with this median and mean, cut off at `longest`."""
    spread = math.sqrt(2 * math.log(mean / median))
    draws = median * np.exp(spread * np.random.default_rng(seed).standard_normal(num))
    lengths: Int64Array = np.clip(draws, 2, longest).astype(np.int64)
    return lengths


def measured_waiting(ranks: int, steps: int, median: float, mean: float, figures: MutableMapping[str, float]) -> Table:
    """Train `steps` steps on `ranks` processes, both ways; adds `wait_share_before_N` and `wait_share_after_N`.

    Raises:
        CaseFailed: the processes failed; the message says why.
    """
    options = {"steps": steps, "median": median, "mean": mean}
    module = "turbogr.bench._balance_measured"
    times = measured(f"waiting of {ranks} ranks", lambda: run_as_ranks(module, ranks, options))
    rows: list[list[Cell]] = []
    for when, strategy in _STRATEGIES.items():
        found = times[when]
        figures[f"wait_share_{when}_{ranks}"] = 100 * found["waiting"]
        rows.append([strategy, 100 * found["waiting"], 100 * found["planned"], 1e3 * found["seconds"]])
    a, b = (1e6 * number for number in times["cost"])
    title = f"Measured on {ranks} processes: n tokens cost {a:.3g}·n + {b:.3g}·n² µs"
    return Table(title, ["strategy", "waiting %", "by the cost model %", "slowest rank ms"], rows)


def planned_waiting(ranks: int, steps: int) -> dict[str, list[float]]:
    """Train on half-full sequences, 2 for each of `ranks` processes, in order, shared by cost, and planned together.

    Returns by way the per cent waited: with equal ranks; with the last one at half speed (it computes everything twice)
    where balancing does not know it; and where it does.

    Raises:
        MeasurementFailed: the processes failed; the message says why.
    """
    found = run_as_ranks("turbogr.bench._balance_measured", ranks, {"planned_steps": steps})
    return {way: [100 * share for share in shares] for way, shares in found.items()}


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Measure on all ranks together; return the same result on each."""
    if "planned_steps" in options:
        return _measure_planned(world, options["planned_steps"])
    stepper, cost = _prepare(world)
    batch_size = world.size * _BATCH_SIZE
    lengths = lognormal(options["steps"] * batch_size, options["median"] / _SCALE, options["mean"] / _SCALE, _MAX_LEN)
    result: dict[str, Any] = {"cost": [cost.a, cost.b]}
    for when, strategy in _STRATEGIES.items():
        plan = plan_steps(lengths, world=world.size, batch_size=batch_size, strategy=strategy, cost=cost)
        own = np.min([_own_seconds(stepper, lengths, list(plan)) for _ in range(_REPEATS)], axis=0)
        seconds = np.array(world.gather_objects(own)).T
        planned = np.array([[cost.step_cost(lengths[part]) for part in step] for step in plan])
        slowest = float(seconds.max(axis=1).mean())
        result[when] = {"waiting": wait_share(seconds), "planned": wait_share(planned), "seconds": slowest}
    return result


def _measure_planned(world: World, steps: int) -> dict[str, list[float]]:
    stepper, cost = _prepare(world)
    size = 2 * world.size
    lengths = filled_lengths(steps * size, _MAX_LEN)
    windows = plan_windows(lengths, batch_size=size, ranks=world.size, window=steps, cost=cost)
    slow = np.ones(world.size)
    slow[-1] = 0.5
    result = {}
    for way in ("before", "shared", "after"):
        shares = []
        for speeds, known in ((np.ones(world.size), True), (slow, False), (slow, True)):
            options: dict[str, Any] = {"world": world.size, "cost": cost, "speeds": speeds if known else None}
            strategy: Strategy = "none" if way == "before" else "reallocate"
            if way == "after":
                plan = []
                for number in range(len(windows)):
                    chosen, parts = windows.step(number)
                    shared = share_step(
                        lengths[chosen], strategy=strategy, parts=parts, num_parts=world.size, **options
                    )
                    plan.append([chosen[share] for share in shared])
            else:
                plan = list(plan_steps(lengths, batch_size=size, strategy=strategy, **options))
            times = round(1 / speeds[world.rank])
            own = np.min([_own_seconds(stepper, lengths, plan, times) for _ in range(_REPEATS)], axis=0)
            shares.append(wait_share(np.array(world.gather_objects(own)).T))
        result[way] = shares
    return result


def _prepare(world: World) -> tuple[Stepper, CostModel]:
    """Return a small model on every rank and what sequences cost there, as one rank has measured it."""
    model = ModelConfig(dim=64, num_blocks=2, num_heads=2, max_len=_MAX_LEN)
    sizes: dict[str, Any] = {"num_sequences": 2**20, "typical_length": _MAX_LEN, "longest_length": _MAX_LEN}
    config, device = resolve(Config(model=model), num_items=_NUM_ITEMS, **sizes), torch.device("cpu")
    measured = measure_cost(config, _NUM_ITEMS, device=device) if world.is_first else CostModel()
    cost = world.gather_objects(measured)[0]
    mesh = Mesh.build(world, choose_mesh(world.size, world.local_size), "cpu")
    return Stepper(config, _NUM_ITEMS, device=device, mesh=mesh), cost


def _own_seconds(stepper: Stepper, lengths: Int64Array, plan: list[list[Int64Array]], times: int = 1) -> Float64Array:
    """Train on every step of a plan; return the seconds that this rank computed in each, [steps].

    A slow rank computes everything several `times`.
    """
    world, seconds = stepper.mesh.world, []
    for number, parts in enumerate(plan):
        step_lengths = torch.from_numpy(lengths[np.concatenate(parts)])
        batch = made_up_batch(lengths[parts[world.rank]], _NUM_ITEMS)
        batch = dataclasses.replace(batch, step_lengths=step_lengths)
        batch = stepper.prepare(batch, number)
        working_set = stepper.fetch(batch)
        world.barrier()
        started = time.perf_counter()
        for _ in range(times - 1):
            if batch.num_tokens:
                stepper.loss(batch, working_set, number).backward()  # type: ignore[no-untyped-call]
        loss = stepper.compute(batch, working_set, number)
        seconds.append(time.perf_counter() - started)
        world.barrier()
        rows = stepper.reduce(working_set)
        stepper.update(rows, stepper.measure(loss, rows).grad_norm, 1.0)
    return np.array(seconds)


if __name__ == "__main__":
    rank_main(measure)
