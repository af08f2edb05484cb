"""How much of the communication of item vectors hides behind computing, by mode, link speed and size of the model.

Two nodes, emulated with network namespaces, share one item table. `serial` does one thing after the other, `pipeline`
loads and exchanges ids ahead, `semi_async` and `exact_overlap` are the update modes of training. The demand of a case
is the time that its vectors and gradients need on the link divided by the time that a step computes: beyond 1 no
schedule can hide them. The figures without a suffix are those of the `headline_model` on the `headline_mbits` link with
the first number of ranks; `single_process_overhead` is what the pipeline costs where there is nothing to hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbogr.bench._network import emulated_network
from turbogr.bench._overlap_rank import PIPELINES
from turbogr.bench._ranks import run_as_ranks
from turbogr.bench.record import Cell, Result, Table
from turbogr.config import PRESETS
from turbogr.errors import UserError, nearest
from turbogr.report.charts import Axis, Series, percent, scatter_chart

SETTINGS: dict[str, Any] = {
    "ranks": [2, 4],
    "mbits": [500, 2000, 8000],
    "models": ["tiny", "small", "medium"],
    "headline_model": "medium",
    "headline_mbits": 2000,
    "sequences": 2,  # per rank and step
    "length": 256,
    "num_items": 100_000,
    "num_negatives": 32,
    "seconds": 2.0,  # of measured steps per case
    "min_steps": 3,
    "max_steps": 16,
    "groups": 1,
}

_NODES = 2
_RANK = "turbogr.bench._overlap_rank"
_COLUMNS = ["model", "ranks", "Mbit/s", "demand", "mode", "step ms", "speed-up", "compute", "sparse", "dense", "idle"]


def run(settings: Mapping[str, Any]) -> Result:
    """Measure; figures as above, and `exposed_sparse_share_MODE_MODEL_MBITS_RANKS` for every case."""
    for name in settings["models"]:
        if name not in PRESETS:
            raise UserError(f"models: unknown '{name}', choose from {', '.join(PRESETS)}.{nearest(name, PRESETS)}")
    options = {**settings, "modes": list(PIPELINES)}
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    points: dict[str, list[tuple[float, float]]] = {mode: [] for mode in PIPELINES}
    notes = set()
    for ranks in settings["ranks"]:
        for mbits in settings["mbits"]:
            with emulated_network(_NODES, mbits) as network:
                notes.add(network.note)
                found = run_as_ranks(_RANK, ranks, options, network)
            for model, modes in found.items():
                demand = link_demand(modes, ranks, mbits)
                is_headline = (model, mbits) == (settings["headline_model"], settings["headline_mbits"])
                is_headline = is_headline and ranks == settings["ranks"][0]
                for mode, step in modes.items():
                    case = _figures(mode, step, modes["serial"])
                    share = case[f"exposed_sparse_share_{mode}"]
                    figures[f"exposed_sparse_share_{mode}_{model}_{mbits}_{ranks}"] = share
                    if is_headline:
                        figures |= {**case, "collision_rate": collision_rate(modes)}
                    points[mode].append((demand, share))
                    rows.append([model, ranks, mbits, demand, *_row(mode, step, case)])
    overhead = run_as_ranks(_RANK, 1, {**options, "models": ["tiny", "small"]})
    figures["single_process_overhead"] = max(overhead.values())
    return Result(figures, [Table("Steps on two nodes", _COLUMNS, rows)], {"overlap": _plot(points)}, sorted(notes))


def link_demand(modes: Mapping[str, Mapping[str, float]], ranks: int, mbits: float) -> float:
    """Seconds that rows and their gradients need on a node's link, per second of computing.

    Of the rows that a rank asks for, the share that lives on the other node crosses, once as vectors and once, the
    other way, as gradients; so in each direction a node sends vectors to the other's ranks and gradients of its own.
    """
    serial = modes["serial"]
    crossing = modes["semi_async"]["rows_asked"] * (ranks / _NODES) * (1 - 1 / _NODES)
    num_bytes = 2 * crossing * serial["dim"] * 4
    return num_bytes * 8 / (mbits * 1e6) / (serial["seconds"] * _compute_share(serial))


def collision_rate(modes: Mapping[str, Mapping[str, float]]) -> float:
    """Share of a batch's rows that the batch before has too."""
    step = modes["exact_overlap"]
    return step["rows_shared"] / max(1.0, step["rows_read"])


def _compute_share(step: Mapping[str, float]) -> float:
    return 1.0 - step["exposed_sparse"] - step["exposed_dense"] - step["idle"]


def _figures(mode: str, step: Mapping[str, float], serial: Mapping[str, float]) -> dict[str, float]:
    return {
        f"exposed_sparse_share_{mode}": step["exposed_sparse"],
        f"compute_share_{mode}": _compute_share(step),
        f"step_speedup_{mode}": serial["seconds"] / step["seconds"],
    }


def _row(mode: str, step: Mapping[str, float], case: Mapping[str, float]) -> list[Cell]:
    return [
        mode,
        1e3 * step["seconds"],
        case[f"step_speedup_{mode}"],
        case[f"compute_share_{mode}"],
        step["exposed_sparse"],
        step["exposed_dense"],
        step["idle"],
    ]


def _plot(points: Mapping[str, list[tuple[float, float]]]) -> str:
    series = []
    for mode, found in points.items():
        ordered = sorted(found)
        series.append(Series(mode, [demand for demand, _ in ordered], [share for _, share in ordered]))
    # Beyond a demand of 1 the link is busy all the time, and what does not fit beside computing is exposed.
    longest = max(demand for found in points.values() for demand, _ in found)
    demands = [demand for power in range(80) if (demand := 0.02 * 1.1**power) <= max(2.0, longest)]
    bound = Series("least possible", demands, [max(0.0, 1.0 - 1.0 / demand) for demand in demands])
    return scatter_chart(
        series,
        title="Exposed communication of item vectors",
        x=Axis("demand: time on the link ÷ time of computing", log=True),
        y=Axis("share of the step", zero=True, format=percent),
        reference=bound,
    )
