"""The loss against negatives: time, memory and share of the step, by their number, for every way to compute it.

Plain gather is what the public code does: the vectors of all negatives of all positions, then a pass at a time. All
others fetch distinct rows and use the compiled operator: in one piece, with negatives in fp16 or int8, in segments of
16 MB, with 64 drawn for a position and the rest shared, and fp16, segments and sharing together. A measurement runs
from ids to the gradients of queries and rows, in a process of its own; the rest of a step is that of an HSTU of two
blocks. Rounding to fp16 in the kernel is also compared with a shadow of the table that is kept in step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

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
from turbogr.report.charts import Axis, Series, line_chart

SETTINGS: dict[str, Any] = {
    "negatives": [32, 128, 512, 1024],
    "lengths": [200, 2048, 8192],
    "tokens": 4096,  # of a batch; a longer length means fewer sequences, at least one
    "items": 100_000,
    "dim": 64,
    "ways": [PLAIN, *WAYS],
    "repeats": 3,
    "threads": 0,  # 0: as many as torch uses
}

_BEST = "all together"
# Tensors of positions x negatives x columns that plain gather was seen to hold at once: vectors, their unit vectors,
# products, gradients of these and what their sums need.
_PLAIN_COPIES = 12

Found = dict[tuple[str, int, int], Measured]


def run(settings: Mapping[str, Any]) -> Result:
    """Measure every way; figures are the worst over the lengths.

    `memory_saving_N` and `step_ratio_N` compare everything together with plain gather at N negatives that count,
    `speedup_N` compares sharing with it; of the loss alone, but for the step's ratio. `kernel_rounding_*` and
    `shadow_*` are what fp16 negatives add to a step, at the most negatives and the first length.

    Raises:
        UserError: an unknown way, or fewer than two negatives.
    """
    unknown = set(settings["ways"]) - {PLAIN, *WAYS}
    if unknown:
        raise UserError(f"ways: there is no '{unknown.pop()}'; choose from {', '.join([PLAIN, *WAYS])}")
    if min(settings["negatives"]) < 2:
        raise UserError(f"negatives: {min(settings['negatives'])} cannot be shared; give 2 or more")
    threads = settings["threads"] or torch.get_num_threads()
    found: Found = {}
    models: dict[int, float] = {}
    notes: list[str] = []
    for length in settings["lengths"]:
        sizes = (length, settings["tokens"], settings["items"], settings["dim"], settings["repeats"], threads)
        models[length] = measure_in_child(Case(MODEL, 2, *sizes)).seconds
        for count in settings["negatives"]:
            for way in settings["ways"]:
                if way == PLAIN and (note := _too_large(count, length, settings)):
                    notes.append(note)
                    continue
                found[way, count, length] = measure_in_child(Case(way, count, *sizes))
    count, length = max(settings["negatives"]), settings["lengths"][0]
    sizes = (length, settings["tokens"], settings["items"], settings["dim"], settings["repeats"], threads)
    rounding = measure_rounding_in_child(Case("fp16", count, *sizes))
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
    """Milliseconds and MiB that fp16 negatives add to a step."""
    return {
        "kernel_rounding_ms": 1e3 * rounding.kernel_seconds,
        "kernel_rounding_mib": rounding.kernel_bytes / 2**20,
        "shadow_ms": 1e3 * rounding.shadow_seconds,
        "shadow_mib": rounding.shadow_bytes / 2**20,
    }


def _rounding_table(num_negatives: int, rounding: Rounding) -> Table:
    values = list(rounding_figures(rounding).values())
    rows: list[list[Cell]] = [["rounded in the kernel", *values[:2]], ["shadow kept in step", *values[2:]]]
    return Table(f"What fp16 adds to a step of {num_negatives:,} negatives", ["way", "ms", "MiB"], rows)


def figures(
    negatives: Sequence[int], lengths: Sequence[int], found: Found, models: Mapping[int, float]
) -> dict[str, float]:
    """The worst of each comparison over the lengths at which both sides were measured."""
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
    wanted = _PLAIN_COPIES * 4 * max(settings["tokens"], length) * num_negatives * settings["dim"]
    there = memory_bytes()
    if there is None or wanted < 0.7 * there:
        return None
    size = f"{wanted / 2**30:.0f} GiB"
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
    return line_chart(series, title=title, x=Axis("negatives that count", log=True), y=Axis(unit, log=True))
