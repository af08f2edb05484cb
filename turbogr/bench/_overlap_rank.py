"""One rank of `bench overlap`: steps in every mode, where their time went, and what consecutive batches share.

All sequences have the same length, so that ranks wait for each other's rows and for nothing else. Items are as popular
as 1 / rank.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbogr import ops
from turbogr.bench._ranks import serve
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
from turbogr.data.store import Store
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import World
from turbogr.train.progress import Window
from turbogr.train.timeline import Timeline
from turbogr.train.trainer import Trainer

PIPELINES: dict[str, dict[str, Any]] = {
    "serial": {"mode": "sync", "depth": 1},
    "pipeline": {"mode": "sync", "depth": 6},
    "semi_async": {"mode": "semi_async", "depth": 6},
    "exact_overlap": {"mode": "exact_overlap", "depth": 6},
}
_FIRST_WAIT = {"serial": "exposed_sparse", "pipeline": "exposed_sparse"}
"""What a rank waits for first after the backward, where it is not the sum of the dense gradients."""
_BEHIND = 1  # steps to read ahead for while the last measured one runs
_ROUNDS = 6


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Time every mode with every model, or on one rank what the pipeline alone costs."""
    ops.keep_freed_memory()
    if world.size == 1:
        return {name: _overhead(world, name, options) for name in options["models"]}
    return {name: {mode: _steps(world, name, mode, options) for mode in options["modes"]} for name in options["models"]}


def _steps(world: World, model: str, mode: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step and its shares, means over the ranks; all ranks return the same.

    `main_cpu` and `other_cpu` are cores that the main thread and all others keep busy; they share one here, so what
    communication computes is lost to the main thread. `skew` is the share of waiting for ranks whose backward took
    longer, which is no communication: all are on this machine and read one clock. It is part of what a rank waits for
    first after its backward, and is taken off that.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(world, model, mode, options, Path(folder))
        marks: list[tuple[float, float, float, Window]] = []
        warm, num_steps = options["warm_steps"], options["max_steps"]
        asked = []
        with trainer.flights() as flights:
            for done, flight in enumerate(flights, 1):
                trainer.step(flight)
                asked.append(0 if flight.request is None else flight.request.ids.numel())
                clocks = time.perf_counter(), time.thread_time(), time.process_time()
                marks.append((*clocks, dataclasses.replace(trainer.progress.window)))
                if done == warm > 1:
                    # Everybody must stop after the same step.
                    slowest = max(world.gather_objects(marks[-1][0] - marks[-2][0]))
                    num_steps = min(num_steps, max(options["min_steps"], round(options["seconds"] / slowest)))
                if done == warm + num_steps + _BEHIND:
                    break
    *start, before = marks[warm - 1]
    *end, after = marks[warm + num_steps - 1]
    seconds, main_seconds, all_seconds = (late - early for early, late in zip(start, end, strict=True))
    own = {
        "seconds": seconds / num_steps,
        "main_cpu": main_seconds / seconds,
        "other_cpu": (all_seconds - main_seconds) / seconds,
        "exposed_sparse": (after.exposed_sparse - before.exposed_sparse) / seconds,
        "exposed_dense": (after.exposed_dense - before.exposed_dense) / seconds,
        "idle": (after.idle - before.idle) / seconds,
        "rows_asked": sum(asked) / len(asked),
        "rows_read": float(after.rows_read - before.rows_read) / num_steps,
        "rows_shared": float(after.rows_shared - before.rows_shared) / num_steps,
        "dim": float(trainer.table.dim),
    }
    arrivals = _arrivals(trainer.timeline, range(warm, warm + num_steps))
    last = [max(times) for times in zip(*world.gather_objects([start for start, _ in arrivals]), strict=True)]
    own["skew"] = sum(max(0.0, min(end, late) - start) for (start, end), late in zip(arrivals, last, strict=True))
    own["skew"] /= seconds
    waited = _FIRST_WAIT.get(mode, "exposed_dense")
    own[waited] = max(0.0, own[waited] - own["skew"])
    everyone = world.gather_objects(own)
    return {key: sum(rank[key] for rank in everyone) / world.size for key in own}


def _arrivals(timeline: Timeline, steps: range) -> list[tuple[float, float]]:
    """When this rank began and ended to exchange the gradients of each step."""
    found = {span.step: (span.start, span.end) for span in timeline.spans if span.name == "reduce"}
    return [found[step] for step in steps]


def _overhead(world: World, model: str, options: dict[str, Any]) -> float:
    """How much longer a step of the pipeline takes than one of the serial loop: the best of several turns of each.

    Whatever else the machine does makes a turn longer, never shorter.
    """
    turns: dict[str, list[float]] = {"serial": [], "pipeline": []}
    for number in range(_ROUNDS):
        for mode in ("serial", "pipeline") if number % 2 else ("pipeline", "serial"):
            turns[mode].append(_steps(world, model, mode, options)["seconds"])
    return min(turns["pipeline"]) / min(turns["serial"]) - 1.0


def _make_trainer(world: World, model: str, mode: str, options: dict[str, Any], folder: Path) -> Trainer:
    length, num_items = options["length"], options["num_items"]
    batch_size = max(options["sequences"], world.size)
    config = Config(
        model=ModelConfig(name="hstu", preset=model, max_len=length, dropout=0.5),  # type: ignore[arg-type]
        loss=LossConfig(num_negatives=options["num_negatives"]),
        optimizer=OptimizerConfig(table="adagrad"),
        data=DataConfig(batch_size=batch_size),
        train=TrainConfig(tensorboard=False, profile=False),
        parallel=ParallelConfig(balance="none", check_every=None),
        pipeline=PipelineConfig(**PIPELINES[mode]),
    )
    config = resolve(config, num_items=num_items, num_sequences=2**20, typical_length=1, longest_length=2**31)
    num_sequences = batch_size * (options["warm_steps"] + options["max_steps"] + _BEHIND)
    store = _store(folder / "store", num_sequences, length, num_items)
    mesh = Mesh.build(world, choose_mesh(world.size, world.local_size, groups=options["groups"]), "cpu")
    return Trainer(config, store, folder / "run", device=torch.device("cpu"), gemm_peak=None, mesh=mesh)


def _store(path: Path, num_sequences: int, length: int, num_items: int) -> Store:
    lengths = np.full(
        num_sequences, length + 2, np.int64
    )  # the last one of a user is held out, the one before a target
    uniform = np.random.default_rng(2).random(int(lengths.sum()))
    items = np.minimum(np.exp(uniform * np.log(num_items)).astype(np.int64), num_items - 1)
    return write_store(path, lengths, num_items, items)


if __name__ == "__main__":
    serve(measure)
