"""Measured bandwidth and latency between ranks: a few messages of known size, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from turbogr.parallel.row_exchange import start_exchange
from turbogr.parallel.world import World, communicating

_REPEATS = 7


@dataclass(frozen=True)
class Bandwidth:
    """Latency in seconds and rate in bytes per second and rank: all-to-all (`exchange`), all-reduce (`sum`).

    An exchange counts the bytes that a rank sends to others, a sum 2 (N - 1) / N of the summed bytes, as in a ring.
    """

    exchange_latency: float
    exchange_rate: float
    sum_latency: float
    sum_rate: float


def measure_bandwidth(world: World, num_bytes: int = 1 << 25) -> Bandwidth:
    """Time an all-to-all and an all-reduce of a few bytes and of `num_bytes`; all ranks call it together."""
    assert world.size > 1, "one rank has nobody to communicate with"

    def exchange(size: int) -> float:
        data = torch.zeros(size // 4 // world.size * world.size)
        out = torch.empty_like(data)
        parts = [data.numel() // world.size] * world.size
        return _seconds(world, lambda: start_exchange(out, data, parts, parts, dist.group.WORLD).wait())

    def reduce(size: int) -> float:
        data = torch.zeros(size // 4)
        return _seconds(world, lambda: dist.all_reduce(data))

    small = 4 * world.size
    exchange_latency, sum_latency = exchange(small), reduce(small)
    others = (world.size - 1) / world.size
    return Bandwidth(
        exchange_latency,
        num_bytes * others / max(exchange(num_bytes) - exchange_latency, 1e-9),
        sum_latency,
        2 * num_bytes * others / max(reduce(num_bytes) - sum_latency, 1e-9),
    )


def _seconds(world: World, work: Callable[[], object]) -> float:
    """Return the median over several repeats of the slowest rank's time, the same on all ranks."""

    own = []
    with communicating():
        work()
        for _ in range(_REPEATS):
            dist.barrier()
            started = time.perf_counter()
            work()
            own.append(time.perf_counter() - started)
    everyone = world.gather_objects(own)
    return float(median(max(times) for times in zip(*everyone, strict=True)))
