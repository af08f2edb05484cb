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
from turbogr.config import Config, LossConfig, ModelConfig, OptimizerConfig, resolve
from turbogr.parallel.links import measure_links
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import World
from turbogr.train.calibration import made_up_batch
from turbogr.train.step import Stepper

STAGES = ("fetch", "compute", "reduce", "update")


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Train and time; all ranks return the same.

    `seconds` is what the slowest rank takes in the best step, the others being what else the machine does, and
    `stages` the parts of that step, means over the ranks.
    """
    ops.keep_freed_memory()
    model = ModelConfig(name=options["model"], preset=options["preset"], dropout=0.5)
    sizes = {"num_sequences": 2**20, "typical_length": 1, "longest_length": 2**31}
    config = Config(
        model=model,
        loss=LossConfig(num_negatives=options["num_negatives"]),
        optimizer=OptimizerConfig(table="adagrad"),
    )
    config = resolve(config, num_items=options["num_items"], **sizes)
    mesh = Mesh.build(world, choose_mesh(world.size, world.local_size), "cpu")
    stepper = Stepper(config, options["num_items"], device=torch.device("cpu"), mesh=mesh)
    lengths = np.array(options["lengths"], np.int64)
    batch = made_up_batch(lengths, options["num_items"])
    batch = dataclasses.replace(
        batch,
        events=batch.events + world.rank * batch.num_tokens,
        step_lengths=torch.from_numpy(np.tile(lengths, world.size)),
    )
    warm = max(world.gather_objects(sum(_timed_step(stepper, batch, 0))))
    num_steps = min(options["max_steps"], max(2, math.ceil(options["seconds"] / warm)))
    own = np.array([_timed_step(stepper, batch, step) for step in range(1, num_steps + 1)])
    everyone = np.array(world.gather_objects(own))  # [rank, step, stage]
    slowest = everyone.sum(axis=2).max(axis=0)
    best = int(slowest.argmin())
    return {
        "seconds": float(slowest[best]),
        "stages": dict(zip(STAGES, everyone[:, best].mean(axis=0).tolist(), strict=True)),
        "num_parameters": stepper.model.num_parameters(),
        "steps": num_steps,
        "links": dataclasses.asdict(measure_links(world)) if world.size > 1 else None,
    }


def _timed_step(stepper: Stepper, batch: Any, step: int) -> list[float]:
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


if __name__ == "__main__":
    serve(measure)
