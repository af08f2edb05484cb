"""Measures what sequences cost on this device, for balancing: a few steps of the actual model on random sequences.

Short and long sequences with the same number of tokens separate the linear part of the cost from the quadratic part.
Every shape is timed several times in turn and the median counts, so a busy moment affects one time of each shape.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch

from turbogr.config import Config
from turbogr.data.batching import Batch
from turbogr.data.cost import CostModel, calibrate
from turbogr.data.vocabulary import Int64Array
from turbogr.jagged import Jagged
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.training.step import Stepper

_MAX_ITEMS = 2**16  # a larger table would cost memory and change nothing that depends on length


def measure_cost(
    config: Config, num_items: int, *, device: torch.device, repeats: int = 5, max_seconds: float = 20.0
) -> CostModel:
    """Time forward and backward of the model on sequences of several lengths and fit a cost model, in seconds.

    The config must be resolved. Every length is timed `repeats` times, or fewer (but once) where that takes longer
    than `max_seconds`. Nothing of a run is touched: the model and the table are made for this and dropped. Devices and
    moments differ, so one rank measures and gives the result to all.
    """
    assert config.model.max_len is not None, "resolve the config first"
    shapes = calibration_shapes(config.model.max_len)
    num_items = min(num_items, _MAX_ITEMS)
    timer = _StepTimer(config, num_items, device)
    batches = [made_up_batch(lengths, num_items) for lengths in shapes]
    started = time.perf_counter()
    timer.seconds(batches[0])  # warms up
    times: list[list[float]] = []
    while len(times) < repeats and (not times or time.perf_counter() - started < max_seconds):
        times.append([timer.seconds(batch) for batch in batches])
    return calibrate(list(zip(shapes, np.median(times, axis=0).tolist(), strict=True)))


def with_measured_cost(config: Config, num_items: int, *, device: torch.device) -> Config:
    """Return the config with `parallel.cost` filled in, measured where it is unset; the config must be resolved."""
    if config.parallel.cost is not None:
        return config
    cost = measure_cost(config, num_items, device=device)
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cost=(cost.a, cost.b)))


def calibration_shapes(max_len: int) -> list[Int64Array]:
    """Return the lengths of the sequences of each step: equal within a step, from max_len ÷ 16 to max_len."""
    lengths = sorted({max(1, max_len // parts) for parts in (1, 2, 4, 16)})
    tokens = max(max_len, 512)
    shapes = [np.full(max(1, tokens // length), length, np.int64) for length in lengths]
    # Twice as many of the shortest, to find what a step costs whatever its size.
    return [*shapes, np.full(2 * len(shapes[0]), lengths[0], np.int64)]


def made_up_batch(lengths: Int64Array, num_items: int) -> Batch:
    """Return sequences of `lengths` [B] with random items at random times: what they are changes no cost."""
    random = np.random.default_rng(0)
    total = int(lengths.sum())
    items, targets = (torch.from_numpy(random.integers(0, num_items, total)) for _ in range(2))
    times = torch.from_numpy(np.cumsum(random.integers(1, 5000, total)))
    return Batch(
        users=torch.arange(len(lengths)),
        items=Jagged.from_lengths(items, torch.from_numpy(lengths)),
        events=torch.arange(total),
        times=times,
        next_times=times + 1,
        targets=targets,
    )


class _StepTimer:
    """A model, tables and a loss like those of a run, in this process alone."""

    def __init__(self, config: Config, num_items: int, device: torch.device) -> None:
        self.device = device
        self.stepper = Stepper(config, num_items, device=device, mesh=Mesh(World()))

    def seconds(self, batch: Batch) -> float:
        """Return how long the loss of a batch and its gradients take."""
        self._synchronize()
        started = time.perf_counter()
        prepared = self.stepper.prepare(self.stepper.task.with_made_up_features(batch), 0)
        self.stepper.compute(prepared, self.stepper.fetch(prepared), 0)
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
