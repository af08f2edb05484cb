"""How the cost of a token grows with the length of sequences and with the size of the catalogue.

Claim: cost grows as arithmetic predicts; there is no sudden jump.
Compared with: a prediction with one fitted rate (below).
Keys: `length_N_us_per_token`, `length_N_vs_predicted`, `length_largest_jump`, and the same with `items`.

Whole training steps of a small HSTU, optimiser included, each point in its own process. The prediction:

- length: strict FLOPs of a token (linear in the length for long sequences) ÷ one rate for all lengths;
- catalogue: the smallest catalogue's time, plus the bytes of the further rows that a batch touches ÷ one rate. Ids are
  drawn uniformly, so a batch of n ids touches V (1 - (1 - 1/V)^n) of V rows.

A jump is a step between neighbouring sizes at which the ratio of measured to predicted grows by more than half. The
notes name every jump found, and the sizes at which caches and memory end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from turbogr.bench._journal import measured
from turbogr.bench._training import Case, measure_in_child
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError
from turbogr.machine import memory_bytes
from turbogr.plot import Axis, Series, line_chart

SETTINGS: dict[str, Any] = {
    "lengths": [200, 512, 1024, 2048, 4096, 8192, 16384, 32768],
    "items": [10_000, 100_000, 1_000_000, 10_000_000],
    "length_tokens": 32768,  # of a batch; a larger length means fewer sequences
    "items_tokens": 8192,
    "dim": 128,  # of the model for `lengths`
    "items_dim": 64,  # of the model for `items`
    "num_negatives": 128,
    "seconds": 5.0,  # of measured steps per point, at least one step, after a warm-up step
    "threads": 0,  # 0: as many as torch uses
}

_HEAD_DIM = 64
_JUMP = 1.5
_ITEMS_LENGTH = 256
# Floats of memory traffic per touched row and column: fetch (2), gradient (2), Adam's read and write of three (6).
_PASSES = 10


class Point(NamedTuple):
    """Seconds per token at a size, measured and predicted."""

    size: int
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def run(settings: Mapping[str, Any]) -> Result:
    """Measure both.

    Raises:
        UserError: fewer than two sizes, or a length above the tokens of a batch.
    """
    lengths, items = sorted(settings["lengths"]), sorted(settings["items"])
    for name, sizes in (("lengths", lengths), ("items", items)):
        if len(sizes) == 1:
            raise UserError(f"{name}: one size shows no growth; give at least two, or [] to skip this part")
    if lengths and lengths[-1] > settings["length_tokens"]:
        raise UserError(
            f"lengths: {lengths[-1]} does not fit into a batch of length_tokens={settings['length_tokens']}"
        )
    figures: dict[str, float] = {}
    tables, plots, notes = [], {}, []
    for key, label, sizes, grow in (
        ("length", "sequence length", lengths, _grow_length),
        ("items", "items in the catalogue", items, _grow_items),
    ):
        if not sizes:
            continue
        points = grow(sizes, settings)
        for point in points:
            figures[f"{key}_{point.size}_us_per_token"] = 1e6 * point.measured
            figures[f"{key}_{point.size}_vs_predicted"] = point.ratio
        figures[f"{key}_largest_jump"] = max(b.ratio / a.ratio for a, b in pairwise(points))
        tables.append(_table(label, points))
        plots[key] = _plot(label, points)
        notes.extend(found_jumps(label, points))
    notes.extend(_cache_sizes(settings))
    return Result(figures, tables, plots, notes)


def _grow_length(lengths: Sequence[int], settings: Mapping[str, Any]) -> list[Point]:
    seconds, work = [], []
    for length in lengths:
        case = _case(settings, settings["dim"], length, settings["length_tokens"], 100_000)
        found = measured(f"length {length}", partial(measure_in_child, case))
        seconds.append(1 / found["tokens_per_second"])
        work.append(found["strict_flops_per_second"] / found["tokens_per_second"])
    return predict_from_one_rate(lengths, seconds, work)


def predict_from_one_rate(sizes: Sequence[int], seconds: Sequence[float], work: Sequence[float]) -> list[Point]:
    """Return points with the prediction work ÷ rate, for the one rate that fits best on a logarithmic scale."""
    logs = [math.log(w / s) for w, s in zip(work, seconds, strict=True)]
    rate = math.exp(sum(logs) / len(logs))
    return [Point(size, s, w / rate) for size, s, w in zip(sizes, seconds, work, strict=True)]


def _grow_items(items: Sequence[int], settings: Mapping[str, Any]) -> list[Point]:
    tokens = settings["items_tokens"] // _ITEMS_LENGTH * _ITEMS_LENGTH
    seconds = []
    for count in items:
        case = _case(settings, settings["items_dim"], _ITEMS_LENGTH, tokens, count)
        seconds.append(1 / measured(f"{count} items", partial(measure_in_child, case))["tokens_per_second"])
    ids = tokens * (2 + settings["num_negatives"])
    row_bytes = _PASSES * settings["items_dim"] * 4
    per_token = [touched_rows(count, ids) * row_bytes / tokens for count in items]
    return predict_from_growth(items, seconds, per_token)


def predict_from_growth(sizes: Sequence[int], seconds: Sequence[float], work: Sequence[float]) -> list[Point]:
    """Return points with the prediction: time of the first plus further work ÷ rate, fitted by least squares."""
    more = [w - work[0] for w in work]
    squares = sum(m * m for m in more)
    slope = (
        max(0.0, sum(m * (s - seconds[0]) for m, s in zip(more, seconds, strict=True)) / squares) if squares else 0.0
    )
    return [Point(size, s, seconds[0] + slope * m) for size, s, m in zip(sizes, seconds, more, strict=True)]


def touched_rows(num_rows: int, num_ids: int) -> float:
    """Return the expected number of distinct rows among `num_ids` drawn uniformly from `num_rows`."""
    return -num_rows * math.expm1(num_ids * math.log1p(-1 / num_rows)) if num_rows > 1 else 1.0


def _case(settings: Mapping[str, Any], dim: int, length: int, tokens: int, num_items: int) -> Case:
    heads = max(1, dim // _HEAD_DIM)
    model = {"dim": dim, "num_blocks": 2, "num_heads": heads, "max_len": length, "dropout": 0.2}
    return Case(
        model,
        num_items=num_items,
        batch_size=max(1, tokens // length),
        median_length=length,
        sigma=0.0,
        num_negatives=settings["num_negatives"],
        threads=settings["threads"] or torch.get_num_threads(),
        seconds=settings["seconds"],
    )


def found_jumps(label: str, points: Sequence[Point]) -> list[str]:
    """Return a sentence per jump, or one that says there is none."""
    found = [
        f"{label}: a jump between {a.size:,} and {b.size:,}, where a token costs {b.ratio / a.ratio:.1f} times what "
        "arithmetic predicts from the smaller size"
        for a, b in pairwise(points)
        if b.ratio > _JUMP * a.ratio
    ]
    span = f"from {points[0].size:,} to {points[-1].size:,}"
    ratios = [point.ratio for point in points]
    return found or [f"{label}: no jump {span}; measured is {min(ratios):.2f} to {max(ratios):.2f} of predicted"]


def _cache_sizes(settings: Mapping[str, Any]) -> list[str]:
    """Return the sizes at which caches and memory end: jumps would be there if the kernels did not work in tiles."""
    notes = []
    for level in (2, 3):
        size = cache_bytes(level)
        if size is not None and settings["lengths"]:
            length = size // (2 * 4 * _HEAD_DIM)
            notes.append(
                f"L{level} ({size / 2**20:g} MiB) holds the keys and values of one head up to a length of {length:,}"
            )
        if size is not None and settings["items"]:
            rows = size // (4 * settings["items_dim"])
            notes.append(f"L{level} holds the vectors of {rows:,} items")
    memory = memory_bytes()
    if memory and settings["items"]:
        rows = memory // (3 * 4 * settings["items_dim"])
        notes.append(
            f"memory ({memory / 2**30:.0f} GiB) holds a table with Adam's state of at most {rows:,} items of "
            f"{settings['items_dim']} columns: beyond that a run ends with an error, or swaps if swap is enabled"
        )
    return notes


def cache_bytes(level: int, folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the size of the first processor's data cache of a level, None if the system does not report it."""
    for index in sorted(folder.glob("index*")):
        try:
            if int((index / "level").read_text()) == level and (index / "type").read_text().strip() != "Instruction":
                text = (index / "size").read_text().strip()
                unit = {"K": 2**10, "M": 2**20}.get(text[-1], 1)
                return int(text.rstrip("KM")) * unit
        except (OSError, ValueError):
            continue
    return None


def _table(label: str, points: Sequence[Point]) -> Table:
    rows: list[list[Cell]] = [[p.size, 1e6 * p.measured, 1e6 * p.predicted, p.ratio] for p in points]
    columns = [label, "µs per token", "predicted", "measured / predicted"]
    return Table(f"Time of a token by {label}", columns, rows)


def _plot(label: str, points: Sequence[Point]) -> str:
    sizes = [float(point.size) for point in points]
    return line_chart(
        [
            Series("measured", sizes, [1e6 * point.measured for point in points]),
            Series("predicted from one rate", sizes, [1e6 * point.predicted for point in points]),
        ],
        title=f"Time of a token by {label}",
        x=Axis(label, log=True),
        y=Axis("microseconds", log=True),
    )
