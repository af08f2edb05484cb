"""One rank of `bench scaling`: training steps of fixed work, timed by stage, and the bandwidth between ranks.

Every rank has the same lengths, so that only communication and shared hardware keep two ranks from being twice as fast
as one. The cost of unequal lengths is measured by `bench balance` and added by the simulator.
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
from turbogr.bench._ranks import rank_main
from turbogr.bench._steps import equal_batch, make_stepper
from turbogr.data.batching import Batch
from turbogr.parallel.bandwidth import measure_bandwidth
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import World
from turbogr.training.step import Stepper

STAGES = ("fetch", "compute", "reduce", "update")
_CORE_SIZE = (1024, 1024)
_CORE_SECONDS = 1.0


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Train and time; all ranks return the same.

    `seconds`: the slowest rank's time in the fastest step (other processes on the machine only make steps slower).
    `stages`: the parts of that step, means over the ranks. `core_rate`: matrix products per second of the slowest rank
    while all ranks compute products independently, the ceiling of this hardware.
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
        "num_parameters": stepper.task.num_parameters,
        "steps": num_steps,
        "core_rate": max(rates),
        "links": dataclasses.asdict(measure_bandwidth(world)) if world.size > 1 else None,
    }


def _timed_step(stepper: Stepper, batch: Batch, step: int) -> list[float]:
    """Train on a batch; return the seconds of every stage."""
    marks = [time.perf_counter()]
    batch = stepper.prepare(batch, step)
    working_set = stepper.fetch(batch)
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
    """Return the matrix products per second of the slowest rank while all ranks compute them."""
    left, right = torch.ones(_CORE_SIZE), torch.ones(_CORE_SIZE)
    world.barrier()
    started, products = time.perf_counter(), 0
    while time.perf_counter() - started < _CORE_SECONDS:
        torch.mm(left, right)
        products += 1
    return min(world.gather_objects(products / (time.perf_counter() - started)))


if __name__ == "__main__":
    rank_main(measure)
