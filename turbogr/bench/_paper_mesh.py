"""Table 4 of the paper: flat against hierarchical sparse parallelism, and a mesh chosen by predicted traffic."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

from turbogr.bench._journal import measured
from turbogr.bench._network import emulated_network
from turbogr.bench._paper_rows import Part, Row
from turbogr.bench._ranks import run_as_ranks
from turbogr.bench.record import Cell, Table

_NODES, _PER_NODE = 2, 2
_RANK = "turbogr.bench._paper_mesh_rank"
_ALTERNATIONS = 5


def table4(settings: Mapping[str, Any], part: Part) -> None:
    """Measure both meshes over catalogues and links; the automatic choice is made before they are timed."""
    catalogues = [20_000, 400_000] if settings["quick"] else [20_000, 100_000, 400_000, 2_000_000, 10_000_000]
    links = [500.0, 4000.0] if settings["quick"] else [500.0, 2000.0, 8000.0]
    regrets = []
    rows: list[list[Cell]] = []
    for items in catalogues:
        for megabits in links:
            options = {
                "num_items": items,
                "model": "hstu",
                "preset": "tiny",
                "dim": 32 if items > 2_000_000 else None,
                "lengths": [512],
                "num_negatives": 128,
                "steps": _ALTERNATIONS,
            }
            found = measured(f"{items} items, {megabits:g} Mbit/s", partial(_run, megabits, options))
            flat, hierarchical = median(found["flat"]), median(found["hierarchical"])
            chosen = flat if found["groups"] == 1 else hierarchical
            regret = chosen / min(flat, hierarchical) - 1
            regrets.append(regret)
            name = "flat" if found["groups"] == 1 else "hierarchical"
            predicted = [1e3 * seconds for seconds in found["predicted"]]
            rows.append([items, megabits, 1e3 * flat, 1e3 * hierarchical, *predicted, name, regret])
    columns = ["items", "Mbit/s", "flat ms", "hierarchical ms", "predicted", "predicted", "chosen", "regret"]
    title = f"Communication of a step, {_NODES} nodes x {_PER_NODE} ranks, median of {_ALTERNATIONS} alternations"
    part.tables.append(Table(title, columns, rows))
    part.notes.append(found["reason"])
    savings = [1 - float(row[3] or 0) / float(row[2] or 1) for row in rows]
    part.figures["table4_hierarchical_saving_best"] = max(savings)
    part.figures["table4_hierarchical_saving_worst"] = min(savings)
    part.add(
        Row("table4_auto_regret", "Communication with the mesh chosen by predicted traffic, above the better of both",
            None, "the paper calls HSP adaptive and prints no such figure; flat → HSP: 613 → 373 ms (-39 %)",
            max(regrets),
            f"the largest over {len(catalogues)} catalogues and {len(links)} links; hierarchical against flat saves "
            f"{100 * min(savings):.0f} to {100 * max(savings):.0f} %", "lower", "emulated", ("sections=table4",))
    )  # fmt: skip


def _run(megabits: float, options: Mapping[str, Any]) -> dict[str, Any]:
    with emulated_network(_NODES, megabits) as network:
        return run_as_ranks(_RANK, _NODES * _PER_NODE, {**options, "nodes": _NODES}, network)
