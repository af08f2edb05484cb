"""Communication of flat against hierarchical meshes, on nodes emulated with network namespaces and real gloo traffic.

Claim: a hierarchical mesh saves most of the all-to-all across nodes, and with it a part of the step.
Compared with: a flat mesh on the same ranks; the table also has the paper's savings.
Keys: `all_to_all_saving_C`, `communication_saving_C`, `step_saving_C` of case C (nodes × ranks per node), the same with
`_fp16` and `_bf16` for rows sent in that precision, their error `row_error_fp16_C`, `row_error_bf16_C`, and
`dense_overlap_saving`: dense gradients summed during the backward instead of after it.

Flat is M = 1: one item table sharded over all ranks, whose exchange crosses the network. Hierarchical is one table per
node: the exchange stays on the node, and only the summed gradients of the touched rows cross. A saving is
1 - hierarchical ÷ flat. Namespaces need root; without them all ranks communicate over loopback, and a note says so.

The saving depends on how many rows the ranks have in common: `--set num_items=400000` shows a step with few. Ranks
share the cores of this machine, so computing and the traffic inside a node are slower than with a machine per node; the
default link rate is slow in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from turbogr.bench._journal import measured
from turbogr.bench._network import emulated_network
from turbogr.bench._ranks import run_as_ranks
from turbogr.bench.record import Cell, Result, Table
from turbogr.config import PRESETS
from turbogr.errors import UserError, did_you_mean
from turbogr.parallel.dense_gradients import bucket_bytes_for
from turbogr.plot import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "cases": ["2x2", "4x2"],
    "megabits": 500.0,  # of a node's link, each way
    "preset": "tiny",  # of HSTU
    "lengths": [1024],  # of the sequences of every rank
    "num_items": 20_000,
    "num_negatives": 128,
    "steps": 9,
    "dense_preset": "medium",  # for `dense_overlap_saving`, on 2 nodes x 1 rank
    "dense_lengths": [256],
}

PARTS = {"all_to_all": "all-to-all", "communication": "all communication", "step": "step"}
_PAPER = {"all_to_all": 0.759, "communication": 0.391, "step": 0.091}
_RANK = "turbogr.bench._comm_rank"
_FLAT, _HIERARCHICAL = "flat", "hierarchical"


def run(settings: Mapping[str, Any]) -> Result:
    """Measure all cases, then the dense gradients."""
    shapes = {case: _shape(case) for case in settings["cases"]}
    for key in ("preset", "dense_preset"):
        if settings[key] not in PRESETS:
            hint = did_you_mean(settings[key], PRESETS)
            raise UserError(f"{key}: unknown '{settings[key]}', choose from {', '.join(PRESETS)}.{hint}")
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    errors: list[list[Cell]] = []
    bars: dict[str, list[float]] = {_FLAT: [], _HIERARCHICAL: []}
    notes: dict[str, None] = {}
    for case, (nodes, per_node) in shapes.items():
        options = {**settings, "model": "hstu", "meshes": _meshes(nodes)}
        found, note = measured(case, partial(_run, nodes, per_node, options))
        notes[note] = None
        for part, words in PARTS.items():
            flat = found[_FLAT][part]
            bars[_FLAT].append(1e3 * flat)
            bars[_HIERARCHICAL].append(1e3 * found[_HIERARCHICAL][part])
            for name, suffix in ((_HIERARCHICAL, ""), ("fp16", "_fp16"), ("bf16", "_bf16")):
                figures[f"{part}_saving{suffix}_{case}"] = 1.0 - found[name][part] / flat
            times = [1e3 * found[name][part] for name in found]
            rows.append([case, words, *times, figures[f"{part}_saving_{case}"], _PAPER[part]])
        for precision in ("fp16", "bf16"):
            figures[f"row_error_{precision}_{case}"] = found[precision]["row_error"]
            errors.append([case, precision, found[precision]["row_error"]])
    columns = ["nodes x ranks", "what", "flat ms", "hierarchical ms", "with fp16 ms", "with bf16 ms", "saved", "paper"]
    tables = [
        Table("Flat against hierarchical", columns, rows),
        Table("Error of the rows' gradients by precision", ["nodes x ranks", "precision", "relative"], errors),
        _dense(settings, figures),
    ]
    plot = grouped_bar_chart(
        [f"{case} {word}" for case in shapes for word in ("all-to-all", "total", "step")],
        bars,
        title="Communication of a step, flat against hierarchical",
        width=720,
        y=Axis("milliseconds", zero=True),
    )
    return Result(figures, tables, {"comm": plot}, list(notes))


def _dense(settings: Mapping[str, Any], figures: dict[str, float]) -> Table:
    """Time whole steps with the dense gradients summed in buckets during the backward, and in one piece after it."""
    preset = settings["dense_preset"]
    buckets = {"after the backward": 2**62, "during the backward": bucket_bytes_for(2)}
    options = {**settings, "model": "hstu", "preset": preset, "lengths": settings["dense_lengths"], "buckets": buckets}
    after, during = measured(f"dense gradients of {preset}", lambda: _run(2, 1, options))[0].values()
    figures["dense_overlap_saving"] = 1.0 - during / after
    rows: list[list[Cell]] = [[preset, 1e3 * after, 1e3 * during, 1.0 - during / after]]
    columns = ["preset", "summed after the backward ms", "during it ms", "saved"]
    return Table("Step time by when dense gradients are summed, 2x1", columns, rows)


def _run(nodes: int, per_node: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what the ranks measured, and the note on their network."""
    with emulated_network(nodes, options["megabits"]) as network:
        return run_as_ranks(_RANK, nodes * per_node, options, network), network.note


def _meshes(nodes: int) -> dict[str, tuple[int, str]]:
    """Return the compared meshes by name: number of groups, and precision of the rows that are sent."""
    return {_FLAT: (1, "fp32"), _HIERARCHICAL: (nodes, "fp32"), "fp16": (nodes, "fp16"), "bf16": (nodes, "bf16")}


def _shape(case: str) -> tuple[int, int]:
    parts = case.split("x")
    if len(parts) != 2 or not all(part.isdigit() and 0 < int(part) < 100 for part in parts) or parts[0] == "1":
        raise UserError(f"cases: '{case}' is not NODESxRANKS with two or more nodes, such as 2x2")
    return int(parts[0]), int(parts[1])
