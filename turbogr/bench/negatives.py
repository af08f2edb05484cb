"""The sampled-softmax loss by the number of negatives: time, memory and share of the step, for every implementation.

Claim: with many negatives the loss takes a small part of the time and memory of the public code's.
Compared with: "plain gather", the public code's loss: the vectors of all negatives of all positions in one tensor.
Keys: at N effective negatives, the worst over the lengths: `memory_saving_N` and `step_ratio_N` of "all together",
`speedup_N` of "shared"; `kernel_rounding_ms`, `kernel_rounding_mib`, `shadow_ms`, `shadow_mib`: what fp16 negatives
add to a step.

All but plain gather fetch distinct rows and use the compiled operator: in one piece ("fused"), with negatives in fp16
or int8, in segments of 16 MB, with 64 negatives drawn for a position and the rest shared, and with fp16, segments and
sharing together. A measurement goes from ids to the gradients of queries and rows, in its own process; the rest of the
step is an HSTU of two blocks. Rounding to fp16 in the kernel is compared with an fp16 copy of the table ("shadow") that
is updated after every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from turbogr.bench._journal import measured
from turbogr.bench._negatives import (
    MODEL,
    PLAIN,
    WAYS,
    Case,
    Measured,
    Rounding,
    measure_in_child,
    measure_rounding_in_child,
)
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError
from turbogr.machine import memory_bytes
from turbogr.plot import Axis, Series, line_chart

SETTINGS: dict[str, Any] = {
    "negatives": [32, 128, 512, 1024],
    "lengths": [200, 2048, 8192],
    "tokens": 4096,  # of a batch; a larger length means fewer sequences, at least one
    "items": 100_000,
    "dim": 64,
    "ways": [PLAIN, *WAYS],
    "repeats": 3,
    "threads": 0,  # 0: as many as torch uses
}

_BEST = "all together"
# Tensors of positions x negatives x columns that plain gather holds at once, as observed: vectors, their unit vectors,
# products, their gradients and temporaries of the sums.
_PLAIN_COPIES = 12

Found = dict[tuple[str, int, int], Measured]


def run(settings: Mapping[str, Any]) -> Result:
    """Measure every implementation of `ways`.

    `memory_saving_N` and `speedup_N` are of the loss alone, `step_ratio_N` of the whole step. `kernel_rounding_*` and
    `shadow_*` are at the largest number of negatives and the first length.

    Raises:
        UserError: an unknown implementation, or fewer than two negatives.
    """
    unknown = set(settings["ways"]) - {PLAIN, *WAYS}
    if unknown:
        raise UserError(f"ways: unknown '{unknown.pop()}'; choose from {', '.join([PLAIN, *WAYS])}")
    if min(settings["negatives"]) < 2:
        raise UserError(f"negatives: {min(settings['negatives'])} cannot be shared; give 2 or more")
    threads = settings["threads"] or torch.get_num_threads()
    found: Found = {}
    models: dict[int, float] = {}
    notes: list[str] = []
    for length in settings["lengths"]:
        sizes = (length, settings["tokens"], settings["items"], settings["dim"], settings["repeats"], threads)
        model = Case(MODEL, 2, *sizes)
        models[length] = Measured(*measured(f"{MODEL}, length {length}", partial(measure_in_child, model))).seconds
        for count in settings["negatives"]:
            for way in settings["ways"]:
                if way == PLAIN and (note := _too_large(count, length, settings)):
                    notes.append(note)
                    continue
                name, case = f"{way}, {count} negatives, length {length}", Case(way, count, *sizes)
                found[way, count, length] = Measured(*measured(name, partial(measure_in_child, case)))
    count, length = max(settings["negatives"]), settings["lengths"][0]
    sizes = (length, settings["tokens"], settings["items"], settings["dim"], settings["repeats"], threads)
    rounded = Case("fp16", count, *sizes)
    rounding = Rounding(*measured("fp16 negatives", partial(measure_rounding_in_child, rounded)))
    tables = [_table(length, settings, found, models[length]) for length in settings["lengths"]]
    tables.append(_rounding_table(count, rounding))
    title = f"The loss of {settings['tokens']:,} positions, d {settings['dim']}"
    plots = {
        "time": _plot(f"{title}: time", "milliseconds", 1e3, 0, settings, found),
        "memory": _plot(f"{title}: memory", "MiB", 2**-20, 1, settings, found),
    }
    compared = figures(settings["negatives"], settings["lengths"], found, models)
    return Result({**compared, **rounding_figures(rounding)}, tables, plots, notes)


def rounding_figures(rounding: Rounding) -> dict[str, float]:
    """Return the milliseconds and MiB that fp16 negatives add to a step."""
    return {
        "kernel_rounding_ms": 1e3 * rounding.kernel_seconds,
        "kernel_rounding_mib": rounding.kernel_bytes / 2**20,
        "shadow_ms": 1e3 * rounding.shadow_seconds,
        "shadow_mib": rounding.shadow_bytes / 2**20,
    }


def _rounding_table(num_negatives: int, rounding: Rounding) -> Table:
    values = list(rounding_figures(rounding).values())
    rows: list[list[Cell]] = [["rounded in the kernel", *values[:2]], ["fp16 copy of the table", *values[2:]]]
    return Table(f"Cost of fp16 negatives per step, {num_negatives:,} negatives", ["way", "ms", "MiB"], rows)


def figures(
    negatives: Sequence[int], lengths: Sequence[int], found: Found, models: Mapping[int, float]
) -> dict[str, float]:
    """Return the worst of each comparison over the lengths at which both were measured."""
    result: dict[str, float] = {}
    for count in negatives:
        savings, ratios, speedups = [], [], []
        for length in lengths:
            plain = found.get((PLAIN, count, length))
            best, shared = found.get((_BEST, count, length)), found.get(("shared", count, length))
            if plain and best:
                savings.append(1 - best.peak_bytes / plain.peak_bytes)
                ratios.append((models[length] + best.seconds) / (models[length] + plain.seconds))
            if plain and shared:
                speedups.append(plain.seconds / shared.seconds)
        if ratios:
            result[f"memory_saving_{count}"] = min(savings)
            result[f"step_ratio_{count}"] = max(ratios)
        if speedups:
            result[f"speedup_{count}"] = min(speedups)
    return result


def _too_large(num_negatives: int, length: int, settings: Mapping[str, Any]) -> str | None:
    needed = _PLAIN_COPIES * 4 * max(settings["tokens"], length) * num_negatives * settings["dim"]
    available = memory_bytes()
    if available is None or needed < 0.7 * available:
        return None
    size = f"{needed / 2**30:.0f} GiB"
    return f"{PLAIN} of {num_negatives} negatives at length {length} would take about {size} and was left out"


def _table(length: int, settings: Mapping[str, Any], found: Found, model: float) -> Table:
    rows: list[list[Cell]] = []
    for count in settings["negatives"]:
        for way in settings["ways"]:
            measured = found.get((way, count, length))
            if measured is None:
                rows.append([count, way, None, None, None])
                continue
            share = measured.seconds / (measured.seconds + model)
            rows.append([count, way, 1e3 * measured.seconds, measured.peak_bytes / 2**20, share])
    title = f"Sequences of {length:,}; the model without the loss takes {1e3 * model:.1f} ms"
    return Table(title, ["negatives", "way", "ms", "MiB", "share of the step"], rows)


def _plot(title: str, unit: str, scale: float, field: int, settings: Mapping[str, Any], found: Found) -> str:
    length = settings["lengths"][0]
    series = []
    for way in settings["ways"]:
        points = [
            (count, found[way, count, length]) for count in settings["negatives"] if (way, count, length) in found
        ]
        if points:
            values = [scale * measured[field] for _, measured in points]
            series.append(Series(way, [float(count) for count, _ in points], values))
    return line_chart(series, title=title, x=Axis("effective negatives", log=True), y=Axis(unit, log=True))
