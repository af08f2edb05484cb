"""How much of the communication of item vectors overlaps with computing, by mode, link speed and size of the model.

Claim: `exact_overlap` and `semi_async` hide most of the communication that a schedule can hide.
Compared with: `serial` (one stage after the other) and `pipeline` (sync with batches loaded and ids exchanged ahead).
Keys: `exposed_sparse_share_MODE`, `compute_share_MODE`, `skew_share_MODE`, `other_cpu_MODE`, `step_speedup_MODE` of the
headline case, `collision_rate`, the same with `_items_V` for other catalogues, `single_process_overhead` (cost of the
pipeline on one process), and `exposed_sparse_share_MODE_MODEL_MBITS_RANKS` for every case.

Two nodes, emulated with network namespaces, share one item table. The demand of a case is the time that its vectors and
gradients need on the link ÷ the time that a step computes: beyond 1 no schedule can hide them. The headline case has
more sequences and steps of one model on one link, with the first number of ranks, also with other catalogues, whose
consecutive batches share more or fewer rows. The largest model takes seconds per step, so it has fewer cases and steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from turbogr.bench._journal import measured
from turbogr.bench._network import emulated_network
from turbogr.bench._overlap_rank import PIPELINES
from turbogr.bench._ranks import run_as_ranks
from turbogr.bench.record import Cell, Result, Table
from turbogr.config import PRESETS
from turbogr.errors import UserError, did_you_mean
from turbogr.plot import Axis, Series, percent, scatter_chart

SETTINGS: dict[str, Any] = {
    "ranks": [2, 4],
    "mbits": [500, 2000, 8000],
    "models": ["tiny", "small", "medium"],
    "sequences": 4,  # of a step, over all ranks
    "length": 256,
    "num_items": 100_000,
    "num_negatives": 32,
    "seconds": 0.6,  # of measured steps per case
    "min_steps": 2,
    "max_steps": 16,
    "groups": 1,
    "warm_steps": 2,
    "large_model": "large",  # with the first number of ranks on the links below; empty: skip
    "large_mbits": [2000, 8000],  # its dense gradients alone would fill slower links
    "large_steps": 2,
    "headline_model": "medium",
    "headline_mbits": 2000,
    "headline_sequences": 16,
    "headline_steps": 5,
    "overhead_seconds": 3.0,  # of measured steps on one process, in each round
    "catalogues": [10_000, 1_000_000],  # other numbers of items, for exact_overlap in the headline case
}

_NODES = 2
_ALONE_STEPS = 100
_RANK = "turbogr.bench._overlap_rank"
_SHARES = ["compute", "sparse", "dense", "skew", "idle", "main cpu", "other cpu"]
_WAITS = ["exposed_sparse", "exposed_dense", "skew", "idle"]
_COLUMNS = ["model", "ranks", "Mbit/s", "demand", "mode", "step ms", "speed-up", *_SHARES]
_CATALOGUE_COLUMNS = ["items", "shared rows", "demand", "step ms", *_SHARES]

Step = Mapping[str, float]


def run(settings: Mapping[str, Any]) -> Result:
    """Measure all cases, the headline and the overhead."""
    for name in (*settings["models"], settings["large_model"] or "large", settings["headline_model"]):
        if name not in PRESETS:
            raise UserError(f"models: unknown '{name}', choose from {', '.join(PRESETS)}.{did_you_mean(name, PRESETS)}")
    options = {**settings, "modes": list(PIPELINES)}
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    points: dict[str, list[tuple[float, float]]] = {mode: [] for mode in PIPELINES}
    notes = set()
    for ranks, mbits, case in _cases(options):
        found, note = _measured("", case, ranks, mbits)
        notes.add(note)
        for model, modes in found.items():
            rows += _rows(model, modes, ranks, mbits)
            for mode, step in modes.items():
                figures[f"exposed_sparse_share_{mode}_{model}_{mbits}_{ranks}"] = step["exposed_sparse"]
                points[mode].append((link_demand(modes.values(), ranks, mbits), step["exposed_sparse"]))
    tables = [Table("Steps on two nodes", _COLUMNS, rows)]
    headline, more = _headline(options)
    alone = {"models": ["tiny", "small"], "seconds": settings["overhead_seconds"], "max_steps": _ALONE_STEPS}
    overhead = measured("overhead on one process", lambda: run_as_ranks(_RANK, 1, {**options, **alone}))
    figures |= {**headline, "single_process_overhead": max(overhead.values())}
    return Result(figures, tables + more, {"overlap": _plot(points)} if rows else {}, sorted(notes))


def _cases(options: Mapping[str, Any]) -> Iterator[tuple[int, float, Mapping[str, Any]]]:
    """Yield (number of ranks, Mbit/s, options) of all cases of the table and the plot."""
    for ranks in options["ranks"]:
        yield from ((ranks, mbits, options) for mbits in options["mbits"])
    if options["large_model"]:
        steps = {"warm_steps": 1, "min_steps": options["large_steps"], "max_steps": options["large_steps"]}
        case = {**options, **steps, "models": [options["large_model"]]}
        yield from ((options["ranks"][0], mbits, case) for mbits in options["large_mbits"])


def _measured(
    what: str, options: Mapping[str, Any], ranks: int, mbits: float
) -> tuple[dict[str, dict[str, Step]], str]:
    """Return the steps by model and mode, and the note on the network."""

    def work() -> tuple[dict[str, Any], str]:
        with emulated_network(_NODES, mbits) as network:
            return run_as_ranks(_RANK, ranks, options, network), network.note

    case = f"{what}{', '.join(options['models'])} on {ranks} ranks, {mbits:g} Mbit/s"
    found, note = measured(case, work)
    return found, note


def _headline(options: Mapping[str, Any]) -> tuple[dict[str, float], list[Table]]:
    """Measure the headline case and the other catalogues."""
    model, mbits, ranks = options["headline_model"], options["headline_mbits"], options["ranks"][0]
    steps = options["headline_steps"]
    options = {**options, "models": [model], "sequences": options["headline_sequences"]}
    options |= {"min_steps": steps, "max_steps": steps}
    modes = _measured("headline: ", options, ranks, mbits)[0][model]
    figures = {"collision_rate": collision_rate(modes["exact_overlap"])}
    for mode, step in modes.items():
        figures |= {
            f"exposed_sparse_share_{mode}": step["exposed_sparse"],
            f"compute_share_{mode}": compute_share(step),
            f"skew_share_{mode}": step["skew"],
            f"other_cpu_{mode}": step["other_cpu"],
            f"step_speedup_{mode}": modes["serial"]["seconds"] / step["seconds"],
        }
    catalogues = {options["num_items"]: modes["exact_overlap"]}
    for num_items in options["catalogues"]:
        other = {**options, "num_items": num_items, "modes": ["exact_overlap"]}
        what = f"{num_items} items: "
        catalogues[num_items] = step = _measured(what, other, ranks, mbits)[0][model]["exact_overlap"]
        figures[f"exposed_sparse_share_exact_overlap_items_{num_items}"] = step["exposed_sparse"]
        figures[f"compute_share_exact_overlap_items_{num_items}"] = compute_share(step)
        figures[f"collision_rate_items_{num_items}"] = collision_rate(step)
    rows: list[list[Cell]] = [
        [items, collision_rate(step), link_demand([step], ranks, mbits), 1e3 * step["seconds"], *_shares(step)]
        for items, step in sorted(catalogues.items())
    ]
    return figures, [
        Table("The headline case", _COLUMNS, _rows(model, modes, ranks, mbits)),
        Table("exact_overlap by catalogue", _CATALOGUE_COLUMNS, rows),
    ]


def link_demand(modes: Iterable[Step], ranks: int, mbits: float) -> float:
    """Return the seconds that rows and gradients need on a node's link, per second of computing in the first mode.

    Of the rows that a rank requests, those on the other node cross the link, as vectors in one direction and as
    gradients in the other. So in each direction a node sends vectors to the other's ranks and gradients of its own.
    """
    steps = list(modes)
    crossing = max(step["rows_requested"] for step in steps) * (ranks / _NODES) * (1 - 1 / _NODES)
    num_bytes = 2 * crossing * steps[0]["dim"] * 4
    return num_bytes * 8 / (mbits * 1e6) / (steps[0]["seconds"] * compute_share(steps[0]))


def collision_rate(step: Step) -> float:
    """Return the share of a batch's rows that the previous batch has too."""
    return step["rows_shared"] / max(1.0, step["rows_read"])


def compute_share(step: Step) -> float:
    """Return the share of a step without all waiting."""
    return 1.0 - sum(step[name] for name in _WAITS)


def _shares(step: Step) -> list[Cell]:
    return [compute_share(step), *(step[name] for name in (*_WAITS, "main_cpu", "other_cpu"))]


def _rows(model: str, modes: Mapping[str, Step], ranks: int, mbits: float) -> list[list[Cell]]:
    demand, serial = link_demand(modes.values(), ranks, mbits), modes["serial"]["seconds"]
    return [
        [model, ranks, mbits, demand, mode, 1e3 * step["seconds"], serial / step["seconds"], *_shares(step)]
        for mode, step in modes.items()
    ]


def _plot(points: Mapping[str, list[tuple[float, float]]]) -> str:
    series = []
    for mode, found in points.items():
        ordered = sorted(found)
        series.append(Series(mode, [demand for demand, _ in ordered], [share for _, share in ordered]))
    # Beyond a demand of 1 the link is always busy, and the time that computing does not cover is exposed.
    longest = max(demand for found in points.values() for demand, _ in found)
    demands = [demand for power in range(80) if (demand := 0.02 * 1.1**power) <= max(2.0, longest)]
    bound = Series("lower bound", demands, [max(0.0, 1.0 - 1.0 / demand) for demand in demands])
    return scatter_chart(
        series,
        title="Exposed communication of item vectors",
        x=Axis("demand: time on the link ÷ time of computing", log=True),
        y=Axis("share of the step", zero=True, format=percent),
        reference=bound,
    )
