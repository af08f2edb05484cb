"""One rank of `bench overlap`: steps in every mode, where their time goes, and how many rows consecutive batches share.

All sequences have the same length, so that ranks wait only for each other's rows. The n-th most popular item has a
popularity of 1 / n.
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
from turbogr.bench._ranks import rank_main
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
from turbogr.progress import Window
from turbogr.training.timeline import Timeline
from turbogr.training.trainer import Trainer

PIPELINES: dict[str, dict[str, Any]] = {
    "serial": {"mode": "sync", "depth": 1},
    "pipeline": {"mode": "sync", "depth": 6},
    "semi_async": {"mode": "semi_async", "depth": 6},
    "exact_overlap": {"mode": "exact_overlap", "depth": 6},
}
_FIRST_WAIT = {"serial": "exposed_sparse", "pipeline": "exposed_sparse"}
"""What a rank waits for first after the backward, if not for the sum of the dense gradients."""
_BEHIND = 1  # steps that follow the last measured one, so that it has something to read ahead for
_ROUNDS = 6


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Time every mode with every model; on one rank measure the overhead of the pipeline."""
    ops.keep_freed_memory()
    if world.size == 1:
        return {name: _overhead(world, name, options) for name in options["models"]}
    return {name: {mode: _steps(world, name, mode, options) for mode in options["modes"]} for name in options["models"]}


def _steps(world: World, model: str, mode: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step and its shares, means over the ranks; the same on all ranks.

    `main_cpu` and `other_cpu` are the number of cores that the main thread and all others keep busy. They share one
    core here, so the processor time of communication is lost to the main thread. `skew` is the share of waiting for
    ranks whose backward took longer; that is not communication. It can be measured because all ranks are on this
    machine and read one clock. It is part of what a rank waits for first after its backward, and is subtracted there.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(world, model, mode, options, Path(folder))
        marks: list[tuple[float, float, float, Window]] = []
        warm, num_steps = options["warm_steps"], options["max_steps"]
        num_requested = []
        with trainer.batches() as batches:
            for done, pending in enumerate(batches, 1):
                trainer.step(pending)
                requests = () if pending.request is None else pending.request.requests
                num_requested.append(sum(request.ids.numel() for request in requests))
                clocks = time.perf_counter(), time.thread_time(), time.process_time()
                marks.append((*clocks, dataclasses.replace(trainer.progress.window)))
                if done == warm > 1:
                    # All ranks must stop after the same step.
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
        "rows_requested": sum(num_requested) / len(num_requested),
        "rows_read": float(after.rows_read - before.rows_read) / num_steps,
        "rows_shared": float(after.rows_shared - before.rows_shared) / num_steps,
        "dim": float(trainer.tables.groups[0].dim),
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
    """Return when this rank started and ended the exchange of the gradients of each step."""
    found = {span.step: (span.start, span.end) for span in timeline.spans if span.name == "reduce"}
    return [found[step] for step in steps]


def _overhead(world: World, model: str, options: dict[str, Any]) -> float:
    """Return how much longer a step of the pipeline takes than one of the serial loop: the fastest round of each.

    Other processes on the machine make a round longer, never shorter.
    """
    rounds: dict[str, list[float]] = {"serial": [], "pipeline": []}
    for number in range(_ROUNDS):
        for mode in ("serial", "pipeline") if number % 2 else ("pipeline", "serial"):
            rounds[mode].append(_steps(world, model, mode, options)["seconds"])
    return min(rounds["pipeline"]) / min(rounds["serial"]) - 1.0


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
    return Trainer(config, store, folder / "run", device=torch.device("cpu"), peak_flops=None, mesh=mesh)


def _store(path: Path, num_sequences: int, length: int, num_items: int) -> Store:
    # A user's last event is held out, and the one before is only a target.
    lengths = np.full(num_sequences, length + 2, np.int64)
    uniform = np.random.default_rng(2).random(int(lengths.sum()))
    items = np.minimum(np.exp(uniform * np.log(num_items)).astype(np.int64), num_items - 1)
    return write_store(path, lengths, num_items, items)


if __name__ == "__main__":
    rank_main(measure)
