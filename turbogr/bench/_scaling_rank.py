"""One rank of `bench scaling`: training steps of fixed work, timed by stage, and the speed of the links.

Every rank has the same lengths, so that nothing but communication and shared hardware keeps two ranks from being twice
as fast as one; what unequal lengths cost is measured by `bench balance` and added by the simulator.
"""

from __future__ import annotations

import dataclasses
import math
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from turbogr import ops
from turbogr.bench._ranks import serve
from turbogr.bench._steps import equal_batch, make_stepper
from turbogr.data.batching import Batch
from turbogr.parallel.links import measure_links
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import World
from turbogr.train.step import Stepper

STAGES = ("fetch", "compute", "reduce", "update")
_CORE_SIZE = (1024, 1024)
_CORE_SECONDS = 1.0


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Train and time; all ranks return the same.

    `seconds` is what the slowest rank takes in the best step, the others being what else the machine does, and
    `stages` the parts of that step, means over the ranks. `core_rate` is how fast the slowest rank's core multiplies
    matrices meanwhile, when no rank waits for another: what the machine itself makes of more ranks.
    """
    ops.keep_freed_memory()
    mesh = Mesh.build(world, choose_mesh(world.size, world.local_size), "cpu")
    stepper, batch = make_stepper(options, mesh), equal_batch(options, world)
    warm = max(world.gather_objects(sum(_timed_step(stepper, batch, 0))))
    rates = [_core_rate(world)]
    num_steps = min(options["max_steps"], max(2, math.ceil(options["seconds"] / warm)))
    own = np.array([_timed_step(stepper, batch, step) for step in range(1, num_steps + 1)])
    rates.append(_core_rate(world))
    everyone = np.array(world.gather_objects(own))  # [rank, step, stage]
    slowest = everyone.sum(axis=2).max(axis=0)
    best = int(slowest.argmin())
    return {
        "seconds": float(slowest[best]),
        "stages": dict(zip(STAGES, everyone[:, best].mean(axis=0).tolist(), strict=True)),
        "num_parameters": stepper.model.num_parameters(),
        "steps": num_steps,
        "core_rate": max(rates),
        "links": dataclasses.asdict(measure_links(world)) if world.size > 1 else None,
    }


def _timed_step(stepper: Stepper, batch: Batch, step: int) -> list[float]:
    """Train on a batch; return the seconds of every stage."""
    marks = [time.perf_counter()]
    working_set = stepper.fetch(batch, step)
    marks.append(time.perf_counter())
    loss = stepper.compute(batch, working_set, step)
    marks.append(time.perf_counter())
    rows = stepper.reduce(working_set)
    measured = stepper.measure(loss, rows)
    marks.append(time.perf_counter())
    stepper.update(rows, measured.grad_norm, 1.0)
    marks.append(time.perf_counter())
    return [later - earlier for earlier, later in pairwise(marks)]


def _core_rate(world: World) -> float:
    """Return how many products a second the slowest rank computes while all do."""
    left, right = torch.ones(_CORE_SIZE), torch.ones(_CORE_SIZE)
    world.barrier()
    started, products = time.perf_counter(), 0
    while time.perf_counter() - started < _CORE_SECONDS:
        torch.mm(left, right)
        products += 1
    return min(world.gather_objects(products / (time.perf_counter() - started)))


if __name__ == "__main__":
    serve(measure)
