"""One rank of `bench comm`: the same training steps on several meshes in turn, and the time of their collectives.

Two kinds of steps. Whole steps run unchanged, and the slowest rank's time counts. In separated steps every collective
runs alone between barriers, so that its time does not include waiting for ranks that still compute; again the slowest
rank's time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from turbogr import ops
from turbogr.bench._ranks import rank_main
from turbogr.bench._steps import equal_batch, make_stepper
from turbogr.config import ParallelConfig
from turbogr.data.batching import Batch
from turbogr.parallel import row_encoding, sharded_table
from turbogr.parallel.dense_gradients import FlatGradients
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.row_exchange import start_exchange
from turbogr.parallel.world import World
from turbogr.tables.table import RowGradients
from turbogr.training.step import Stepper

_COLLECTIVES = ("all_to_all_single", "all_gather", "all_reduce")


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Measure the `buckets` or the `meshes` of the options."""
    ops.keep_freed_memory()
    return measure_buckets(world, options) if "buckets" in options else measure_meshes(world, options)


def measure_buckets(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Sum the dense gradients with each of the `buckets` sizes (bytes by name) in turn; return the median seconds of a
    step by name."""
    batch = equal_batch(options, world)
    steppers = {name: _stepper(world, options, world.size, "fp32") for name in options["buckets"]}
    for name, stepper in steppers.items():
        stepper.gradients = FlatGradients(stepper.model, world, options["buckets"][name])
        _train(stepper, batch, 0)
    found: dict[str, list[float]] = {name: [] for name in steppers}
    for number in range(1, options["steps"] + 1):
        for name, stepper in steppers.items():
            found[name].append(_whole(stepper, batch, number))
    return {name: median(values) for name, values in found.items()}


def measure_meshes(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Train on each of the `meshes` in turn; return by name the median seconds of every part.

    `all_to_all`: exchange of ids, vectors and gradients inside groups. `communication`: all collectives. `step`: whole
    steps. `row_error`: distance of the first step's row gradients from those of the first mesh with the same number of
    groups, relative to their norm.
    """
    batch = equal_batch(options, world)
    steppers = {name: _stepper(world, options, *mesh) for name, mesh in options["meshes"].items()}
    gradients = {name: _train(stepper, batch, 0).grad.double() for name, stepper in steppers.items()}
    found: dict[str, dict[str, list[float]]] = {
        name: {"all_to_all": [], "communication": [], "step": []} for name in steppers
    }
    for number in range(1, options["steps"] + 1):
        for name, stepper in steppers.items():
            found[name]["step"].append(_whole(stepper, batch, number))
        for name, stepper in steppers.items():
            exchange, all_collectives = _separated(stepper, batch, number)
            found[name]["all_to_all"].append(exchange)
            found[name]["communication"].append(all_collectives)
    results: dict[str, Any] = {
        name: {part: median(values) for part, values in parts.items()} for name, parts in found.items()
    }
    for name, (groups, _) in options["meshes"].items():
        first = next(other for other, mesh in options["meshes"].items() if mesh[0] == groups)
        results[name]["row_error"] = _distance(world, gradients[name], gradients[first])
    return results


def _stepper(world: World, options: dict[str, Any], groups: int, precision: row_encoding.Precision) -> Stepper:
    mesh = Mesh.build(world, choose_mesh(world.size, world.local_size, groups=groups), "cpu")
    return make_stepper(options, mesh, ParallelConfig(row_precision=precision))


def _train(stepper: Stepper, batch: Batch, step: int) -> RowGradients:
    batch = stepper.prepare(batch, step)
    sets = stepper.fetch(batch)
    loss = stepper.compute(batch, sets, step)
    rows = stepper.reduce(sets)
    stepper.update(rows, stepper.measure(loss, rows).grad_norm, 1.0)
    return rows[0]


def _whole(stepper: Stepper, batch: Batch, step: int) -> float:
    world = stepper.mesh.world
    world.barrier()
    started = time.perf_counter()
    _train(stepper, batch, step)
    return max(world.gather_objects(time.perf_counter() - started))


def _separated(stepper: Stepper, batch: Batch, step: int) -> tuple[float, float]:
    """Return the seconds of the exchange inside groups and of all collectives of a step."""
    with separate_collectives() as calls:
        _train(stepper, batch, step)
    everyone = stepper.mesh.world.gather(torch.tensor([seconds for _, seconds in calls], dtype=torch.float64))
    slowest = everyone.amax(0)
    inside = [group is stepper.mesh.member_ranks and stepper.mesh.members > 1 for group, _ in calls]
    return float(slowest[torch.tensor(inside)].sum()), float(slowest.sum())


@contextmanager
def separate_collectives() -> Iterator[list[tuple[Any, float]]]:
    """Inside the block, run every collective and every row exchange alone, between barriers; fill the yielded list with
    (process group, seconds)."""
    calls: list[tuple[Any, float]] = []
    barrier = dist.barrier

    def timed(run: Callable[[], Any], group: Any) -> None:
        barrier()
        started = time.perf_counter()
        run()
        calls.append((group, time.perf_counter() - started))

    def separated(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, async_op: bool = False, **options: Any) -> _Done | None:
            timed(lambda: collective(*args, group=group, **options), group)
            return _Done() if async_op else None

        return call

    def exchange(*args: Any) -> _Done:
        timed(lambda: start_exchange(*args).wait(), args[-1])
        return _Done()

    with ExitStack() as patched:
        for name in _COLLECTIVES:
            patched.enter_context(mock.patch.object(dist, name, separated(getattr(dist, name))))
        patched.enter_context(mock.patch.object(sharded_table, "start_exchange", exchange))
        yield calls


class _Done:
    """The handle of a finished collective."""

    def wait(self) -> None:
        """Return at once."""


def _distance(world: World, values: Tensor, reference: Tensor) -> float:
    squares = torch.stack([(values - reference).square().sum(), reference.square().sum()])
    difference, norm = world.gather(squares).sum(0).sqrt().tolist()
    return float(difference / norm)


if __name__ == "__main__":
    rank_main(measure)
