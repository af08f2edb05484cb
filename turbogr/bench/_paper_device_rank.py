"""One rank of table 6: records how long a step computes, or trains with a simulated device that takes as long."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turbogr import ops
from turbogr.bench._overlap_rank import PIPELINES
from turbogr.bench._ranks import rank_main
from turbogr.bench._steps import equal_batch, make_stepper
from turbogr.bench._training import write_store
from turbogr.config import (
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
    resolve,
)
from turbogr.data.batching import Batch
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import World
from turbogr.tables.working_set import WorkingSets
from turbogr.training.step import Stepper
from turbogr.training.trainer import Trainer

_WARM, _BEHIND = 2, 1
_FORWARD = 1 / 3  # of the time of forward and backward


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Return `seconds`: of computing alone, or of a step of the job."""
    ops.keep_freed_memory()
    if options["seconds"] is None:
        return {"seconds": _record(world, options)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(world, options, Path(folder))
        trainer.stepper.compute = simulated_device(trainer.stepper, options["seconds"])  # type: ignore[method-assign,assignment]
        marks = []
        with trainer.batches() as batches:
            for done, pending in enumerate(batches, 1):
                trainer.step(pending)
                marks.append(time.perf_counter())
                if done == _WARM + options["steps"] + _BEHIND:
                    break
    own = (marks[_WARM + options["steps"] - 1] - marks[_WARM - 1]) / options["steps"]
    return {"seconds": max(world.gather_objects(own))}


def _record(world: World, options: dict[str, Any]) -> float:
    """Return the seconds of forward and backward, the faster of two."""
    stepper = make_stepper(options, Mesh.build(world, choose_mesh(1, 1), "cpu"))
    batch = equal_batch(options, world)
    found = []
    for number in range(2):
        prepared = stepper.prepare(batch, number)
        sets = stepper.fetch(prepared)
        started = time.perf_counter()
        stepper.compute(prepared, sets, number)
        found.append(time.perf_counter() - started)
        stepper.drop_gradients()
    return min(found)


def simulated_device(stepper: Stepper, seconds: float) -> Callable[[Batch, WorkingSets, int], Tensor]:
    """Return what stands in for `Stepper.compute`: it takes `seconds` and makes gradients of zero, a part at a time.

    As in a backward, gradients of the last parameters are there first, so that their sums start early.
    """
    parameters = list(stepper.model.parameters())[::-1]
    total = sum(parameter.numel() for parameter in parameters)

    def compute(batch: Batch, sets: WorkingSets, step: int) -> Tensor:
        stepper.gradients.attach()
        time.sleep(seconds * _FORWARD)
        due = time.perf_counter()
        for parameter in parameters:
            due += seconds * (1 - _FORWARD) * parameter.numel() / total
            time.sleep(max(0.0, due - time.perf_counter()))
            (parameter.flatten()[0] * 0.0).backward()  # type: ignore[no-untyped-call]
        for group in sets.groups:
            group.rows.grad = torch.zeros_like(group.rows)
        return torch.zeros(())

    return compute


def _make_trainer(world: World, options: dict[str, Any], folder: Path) -> Trainer:
    lengths = np.array(options["lengths"], np.int64)
    preset: Any = options["preset"]
    config = Config(
        model=ModelConfig(name=options["model"], preset=preset, dropout=0.5),
        loss=LossConfig(num_negatives=options["num_negatives"]),
        optimizer=OptimizerConfig(table="adagrad"),
        data=DataConfig(batch_size=world.size * len(lengths)),
        train=TrainConfig(tensorboard=False, profile=False),
        parallel=ParallelConfig(balance="none", check_every=None),
        pipeline=PipelineConfig(**PIPELINES[options["mode"]]),
    )
    num_items = options["num_items"]
    config = resolve(config, num_items=num_items, num_sequences=2**20, typical_length=1, longest_length=2**31)
    steps = _WARM + options["steps"] + _BEHIND
    # A user's last event is held out, and the one before is only a target.
    store = write_store(folder / "store", np.tile(lengths, world.size * steps) + 2, num_items)
    mesh = Mesh.build(world, choose_mesh(world.size, world.local_size), "cpu")
    return Trainer(config, store, folder / "run", device=torch.device("cpu"), peak_flops=None, mesh=mesh)


if __name__ == "__main__":
    rank_main(measure)
