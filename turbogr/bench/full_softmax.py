"""The softmax loss over the whole catalogue: `full_softmax` in tiles against plain PyTorch with all logits in memory.

Claim: forward and backward take at most half the time at width 64, no more at 256, and a tenth of the memory.
Compared with: F.cross_entropy of the [T, V] product of unit vectors, the temperature applied to the queries.
Keys: for V items and width D `speedup_V_D` and `memory_saving_V_D` (1 - ours / theirs, peak above the inputs).

A measurement goes from queries and rows to the gradients of both, in its own process. The two sides take turns and the
fastest run of each counts. Freed memory is kept, as in training: without that plain PyTorch would be slower still.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr import ops
from turbogr.bench._children import in_child
from turbogr.bench._journal import measured
from turbogr.bench._training import _reset_peak, _resident_bytes
from turbogr.bench.record import Cell, Result, Table
from turbogr.machine import memory_bytes
from turbogr.plot import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "items": [3706, 100_000],
    "dims": [64, 256],
    "positions": 4096,
    "repeats": 3,  # of each side
    "threads": 0,  # 0: as many as torch uses
}

PLAIN, TILES = "all logits in memory", "tiles"
_TEMPERATURE = 0.05
_PLAIN_COPIES = 4  # arrays of logits that plain PyTorch holds at once, as observed


class Case(NamedTuple):
    """One side at one size."""

    side: str
    num_items: int
    dim: int
    num_positions: int
    threads: int


class Measured(NamedTuple):
    """Seconds of the fastest forward and backward, and peak memory above the inputs."""

    seconds: float
    peak_bytes: int


def run(settings: Mapping[str, Any]) -> Result:
    """Measure both sides; figures are `speedup_V_D` and `memory_saving_V_D` for V items and width D."""
    threads = settings["threads"] or torch.get_num_threads()
    found: dict[tuple[int, int, str], Measured] = {}
    notes = []
    for num_items in settings["items"]:
        for dim in settings["dims"]:
            sides = [PLAIN, TILES]
            if note := _too_large(settings["positions"], num_items):
                notes.append(note)
                sides = [TILES]
            for repeat in range(settings["repeats"]):
                for side in sides:
                    name = f"{side}, {num_items} items, width {dim}, repeat {repeat}"
                    case = Case(side, num_items, dim, settings["positions"], threads)
                    times = Measured(*measured(name, partial(measure_in_child, case)))
                    found[num_items, dim, side] = _better(times, found.get((num_items, dim, side)))
    return Result(figures(found), [_table(settings, found)], {"full-softmax": _plot(settings, found)}, _unique(notes))


def figures(found: Mapping[tuple[int, int, str], Measured]) -> dict[str, float]:
    """Compare the sides wherever both were measured."""
    result = {}
    for (num_items, dim, side), ours in found.items():
        plain = found.get((num_items, dim, PLAIN))
        if side == TILES and plain is not None:
            result[f"speedup_{num_items}_{dim}"] = plain.seconds / ours.seconds
            result[f"memory_saving_{num_items}_{dim}"] = 1 - ours.peak_bytes / plain.peak_bytes
    return result


def measure_in_child(case: Case) -> Measured:
    """Measure a case in a fresh process, forked from one that has imported this module and done nothing else."""
    return in_child(measure, case, "forkserver")


def measure(case: Case) -> Measured:
    """Run forward and backward twice, after once on a few positions: libraries set themselves up there."""
    torch.set_num_threads(case.threads)
    ops.keep_freed_memory()
    work = prepare(case)
    prepare(case._replace(num_positions=16, num_items=64))()
    before = _resident_bytes("VmRSS")
    _reset_peak()
    seconds = math.inf
    for _ in range(2):
        started = time.perf_counter()
        work()
        seconds = min(seconds, time.perf_counter() - started)
    return Measured(seconds, max(1, _resident_bytes("VmHWM") - before))


def prepare(case: Case) -> Callable[[], tuple[Tensor, ...]]:
    """Return what is measured: loss and gradients of queries and rows."""
    random = torch.Generator().manual_seed(0)
    queries, rows = (torch.randn(n, case.dim, generator=random) for n in (case.num_positions, case.num_items))
    targets = torch.randint(0, case.num_items, (case.num_positions,), generator=random)
    leaves = [queries.requires_grad_(), rows.requires_grad_()]

    def work() -> tuple[Tensor, ...]:
        if case.side == PLAIN:
            logits = F.normalize(queries, eps=1e-6) / _TEMPERATURE @ F.normalize(rows, eps=1e-6).T
            loss = F.cross_entropy(logits, targets, reduction="none")
            del logits
        else:
            loss = ops.full_softmax(queries, rows, targets, temperature=_TEMPERATURE)
        return loss.detach(), *torch.autograd.grad(loss.mean(), leaves)

    return work


def _better(one: Measured, other: Measured | None) -> Measured:
    return one if other is None else Measured(min(one.seconds, other.seconds), min(one.peak_bytes, other.peak_bytes))


def _unique(notes: list[str]) -> list[str]:
    return list(dict.fromkeys(notes))


def _too_large(num_positions: int, num_items: int) -> str | None:
    needed, available = _PLAIN_COPIES * 4 * num_positions * num_items, memory_bytes()
    if available is None or needed < 0.7 * available:
        return None
    return f"plain PyTorch with {num_items:,} items would take about {needed / 2**30:.0f} GiB and was left out"


def _table(settings: Mapping[str, Any], found: Mapping[tuple[int, int, str], Measured]) -> Table:
    rows: list[list[Cell]] = [
        [num_items, dim, side, 1e3 * measured.seconds, measured.peak_bytes / 2**20]
        for (num_items, dim, side), measured in found.items()
    ]
    return Table(_title(settings), ["items", "width", "way", "ms", "MiB"], rows)


def _plot(settings: Mapping[str, Any], found: Mapping[tuple[int, int, str], Measured]) -> str:
    sizes = list(dict.fromkeys((num_items, dim) for num_items, dim, _ in found))
    seconds = {side: [found.get((*size, side)) for size in sizes] for side in (PLAIN, TILES)}
    return grouped_bar_chart(
        [f"{num_items:,} items, d {dim}" for num_items, dim in sizes],
        {side: [1e3 * m.seconds if m else math.nan for m in measured] for side, measured in seconds.items()},
        title=_title(settings),
        y=Axis("milliseconds", log=True),
    )


def _title(settings: Mapping[str, Any]) -> str:
    return f"Softmax over all items, {settings['positions']:,} positions, forward and backward"
