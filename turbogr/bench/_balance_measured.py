"""Real steps of a small model, shared between four ranks whose parts are computed one after the other and timed.

One after the other, as the parts would disturb each other on a machine with fewer cores than ranks. What a rank would
wait is then the difference to the slowest part. The best of several times counts: others are the machine's noise.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import numpy as np
import torch

from turbogr.bench.record import Cell, Table
from turbogr.config import Config, ModelConfig, resolve
from turbogr.data.balance import Strategy, plan_steps, wait_share
from turbogr.data.vocabulary import Int64Array
from turbogr.train.calibration import StepTimer, measure_cost

_WORLD, _BATCH_SIZE, _NUM_ITEMS, _REPEATS = 4, 32, 5000, 5
_SCALE = 16  # lengths are this much shorter than KuaiRand's, so that a step takes a moment on a processor


def lognormal(num: int, median: float, mean: float, longest: int, seed: int = 0) -> Int64Array:
    """Return `num` lengths of a lognormal distribution with this median and mean, cut off at `longest`."""
    spread = math.sqrt(2 * math.log(mean / median))
    draws = median * np.exp(spread * np.random.default_rng(seed).standard_normal(num))
    lengths: Int64Array = np.clip(draws, 2, longest).astype(np.int64)
    return lengths


def measured_waiting(steps: int, median: float, mean: float, figures: MutableMapping[str, float]) -> Table:
    """Time `steps` steps with and without balancing; adds `measured_wait_before_4` and `measured_wait_after_4`."""
    longest = 8192 // _SCALE
    model = ModelConfig(dim=64, num_blocks=2, num_heads=2, max_len=longest)
    sizes = {"num_sequences": 2**20, "typical_length": longest, "longest_length": longest}
    config = resolve(Config(model=model), num_items=_NUM_ITEMS, **sizes)
    device = torch.device("cpu")
    cost = measure_cost(config, _NUM_ITEMS, device=device)
    timer = StepTimer(config, _NUM_ITEMS, device)
    lengths = lognormal(steps * _BATCH_SIZE, median / _SCALE, mean / _SCALE, longest)
    rows: list[list[Cell]] = []
    strategies: dict[str, Strategy] = {"before": "none", "after": "reallocate"}
    for when, strategy in strategies.items():
        plan = plan_steps(lengths, world=_WORLD, batch_size=_BATCH_SIZE, strategy=strategy, cost=cost)
        seconds = np.array([[_seconds(timer, lengths[part]) for part in step] for step in plan])
        planned = np.array([[cost.step_cost(lengths[part]) for part in step] for step in plan])
        figures[f"measured_wait_{when}_{_WORLD}"] = 100 * wait_share(seconds)
        rows.append([strategy, 100 * wait_share(seconds), 100 * wait_share(planned), 1e3 * seconds.max(axis=1).mean()])
    columns = ["strategy", "waiting % measured", "planned", "slowest rank ms"]
    title = f"Measured parts of {_WORLD} ranks, {_cost_text(cost.a, cost.b)}"
    return Table(title, columns, rows)


def _cost_text(a: float, b: float) -> str:
    """Write down a measured cost in microseconds."""
    return f"{1e6 * a:.3g}·n + {1e6 * b:.3g}·n² µs for n tokens"


def _seconds(timer: StepTimer, lengths: Int64Array) -> float:
    if not len(lengths):
        return 0.0
    batch = timer.batch(lengths)
    return min(timer.seconds(batch) for _ in range(_REPEATS))
