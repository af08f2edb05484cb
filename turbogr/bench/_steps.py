"""Training steps for the ranks of a benchmark: a model of the paper's sizes on generated sequences of given lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from turbogr.config import Config, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig, resolve
from turbogr.data.batching import Batch
from turbogr.jagged import Jagged
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.training.cost_measurement import made_up_batch
from turbogr.training.step import Stepper


def make_stepper(options: dict[str, Any], mesh: Mesh, parallel: ParallelConfig | None = None) -> Stepper:
    """Return a stepper with the `model`, `preset`, `num_items` and `num_negatives` of the options, and row Adagrad."""
    config = Config(
        model=ModelConfig(
            name=options["model"],
            preset=options["preset"],
            dropout=0.5,
            **({"dim": options["dim"]} if options.get("dim") else {}),
        ),
        loss=LossConfig(num_negatives=options["num_negatives"]),
        optimizer=OptimizerConfig(table="adagrad"),
        parallel=parallel or ParallelConfig(),
    )
    sizes: dict[str, Any] = {"num_sequences": 2**20, "typical_length": 1, "longest_length": 2**31}
    config = resolve(config, num_items=options["num_items"], **sizes)
    return Stepper(config, options["num_items"], device=torch.device("cpu"), mesh=mesh)


def equal_batch(options: dict[str, Any], world: World) -> Batch:
    """Return this rank's part of a step in which every rank has sequences of the options' `lengths` with its own
    items."""
    lengths = np.array(options["lengths"], np.int64)
    step = made_up_batch(np.tile(lengths, world.size), options["num_items"])
    num_tokens = int(lengths.sum())
    own = slice(world.rank * num_tokens, (world.rank + 1) * num_tokens)
    assert step.targets is not None
    return Batch(
        users=step.users[world.rank * len(lengths) : (world.rank + 1) * len(lengths)],
        items=Jagged.from_lengths(step.items.values[own], torch.from_numpy(lengths)),
        events=step.events[own],
        times=step.times[own],
        next_times=step.next_times[own],
        targets=step.targets[own],
        step_lengths=step.items.lengths,
    )
