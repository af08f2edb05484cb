"""Weak scaling: one rank against two with a core each and the same work per rank, and a simulator for more ranks.

Claim: two ranks are nearly twice as fast as one, and many ranks scale nearly linearly.
Compared with: one rank; two independent GEMMs on the same cores, the ceiling of this hardware.
Keys, for preset P: `efficiency_2_P`, `cores_2_P` (efficiency of two independent GEMMs), `efficiency_N_simulated_P`, and
`simulator_error` if one of the presets is run on all `judge_ranks`.

Efficiency is throughput(N) / (N · throughput(1)) with fixed work per rank. Presets are those of the paper, with
sequences like KuaiRand-27K. The simulator uses the stages of a step on one rank, the bandwidth between two and the
balance of the lengths. Its error is measured on real runs with 2 and 4 ranks; then it predicts larger jobs: machines of
`node_size` ranks with processors like this one, connected by `network_gbps` each. If `cores_2_P` is below 1, hardware
is the limit and not communication.

A step of the largest presets takes half a minute on a core: measure them one by one with `--set presets=hstu_large`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from turbogr.bench._balance_measured import lognormal
from turbogr.bench._journal import CaseFailed, measured
from turbogr.bench._paper_models import PAPER_CASES, paper_model
from turbogr.bench._ranks import ranks_per_core, run_as_ranks
from turbogr.bench._simulator import Cluster, Link, OneRank, Work, step_seconds
from turbogr.bench.record import Cell, Result, Table
from turbogr.config import PRESETS, ModelConfig
from turbogr.data.balance import plan_steps, wait_share
from turbogr.errors import UserError, did_you_mean
from turbogr.models.flops import counted_cost
from turbogr.plot import Axis, Series, line_chart

SETTINGS: dict[str, Any] = {
    "presets": list(PAPER_CASES),
    "seconds": 20.0,  # of measured steps per number of ranks, but at least two steps
    "max_steps": 20,
    "sequences": 0,  # per rank and step; 0: by the preset
    "num_items": 100_000,
    "num_negatives": 128,
    "judge_ranks": [2, 4],  # real runs that the simulator is compared with
    "judge_presets": ["hstu_tiny", "hstu_small"],  # 4 ranks of larger ones do not fit into memory
    "simulated": [8, 16, 32, 64, 128, 256, 512, 1024],
    "node_size": 8,
    "network_gbps": 100.0,
    "network_latency": 2e-5,
}

_SEQUENCES = {
    "tiny": 8,
    "small": 4,
    "medium": 2,
    "large": 2,
    "long": 1,
    "fuxi_large": 1,
}  # as many as two ranks have memory for
_MEDIAN, _MEAN = 8591, 11_796
_RANK = "turbogr.bench._scaling_rank"
_COLUMNS = ["preset", "sequences", "1 rank s", "2 ranks s", "efficiency", "ceiling (2 GEMMs)"]


@dataclass(frozen=True)
class Measured:
    """A preset on one and on two ranks."""

    work: Work
    one: OneRank
    seconds: dict[int, float]
    links: dict[str, float]
    cores: float
    max_len: int
    sequences: int
    model: ModelConfig
    num_negatives: int


def run(settings: Mapping[str, Any]) -> Result:
    """Measure and simulate.

    Raises:
        UserError: an unknown preset, or none that could be measured.
    """
    for name in settings["presets"]:
        if name not in PAPER_CASES:
            raise UserError(
                f"presets: unknown '{name}', choose from {', '.join(PAPER_CASES)}.{did_you_mean(name, PAPER_CASES)}"
            )
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    judged: list[list[Cell]] = []
    judged_on: set[int] = set()
    series = []
    notes = [_assumptions(settings)]
    for name in settings["presets"]:
        ranks = [1, 2, *(settings["judge_ranks"] if name in settings["judge_presets"] else [])]
        try:
            found = _measure(name, sorted(set(ranks)), settings)
        except CaseFailed as error:
            notes.append(f"{name} is left out: {error}")
            continue
        efficiency = found.seconds[1] / found.seconds[2]
        figures[f"efficiency_2_{name}"] = efficiency
        figures[f"cores_2_{name}"] = found.cores
        rows.append([name, found.sequences, found.seconds[1], found.seconds[2], efficiency, found.cores])
        judged += [_judge(name, found, size) for size in found.seconds if size > 1]
        judged_on |= found.seconds.keys()
        curve = [_simulated_efficiency(found, size, settings) for size in settings["simulated"]]
        figures.update(
            {f"efficiency_{n}_simulated_{name}": e for n, e in zip(settings["simulated"], curve, strict=True)}
        )
        series.append(Series(name, settings["simulated"], curve))
    if not rows:
        raise UserError(f"no preset could be measured: {'; '.join(notes[1:])}")
    if judged_on - {1, 2}:
        figures["simulator_error"] = float(np.mean([abs(float(row[-1] or 0.0)) for row in judged]))
    tables = [
        Table("Step time with the same work per rank", _COLUMNS, rows),
        Table("Simulator against real ranks", ["preset", "ranks", "real s", "simulated s", "error"], judged),
    ]
    plot = line_chart(
        series,
        title="Simulated efficiency, fixed work per rank",
        x=Axis("ranks", log=True, format=lambda ranks: f"{ranks:,.0f}"),
        y=Axis("throughput ÷ (N · throughput of one rank)", zero=True),
    )
    return Result(figures, tables, {"scaling": plot}, notes)


def _measure(name: str, sizes: list[int], settings: Mapping[str, Any]) -> Measured:
    model_name, size = paper_model(name)
    model = ModelConfig(name=model_name, preset=size, dropout=0.5)  # type: ignore[arg-type]
    max_len, dim = PRESETS[size]["max_len"], PRESETS[size]["dim"]
    sequences = settings["sequences"] or _SEQUENCES.get(name, _SEQUENCES[size])
    lengths = lognormal(sequences, _MEDIAN, _MEAN, max_len)
    options = {key: settings[key] for key in ("seconds", "max_steps", "num_items", "num_negatives")}
    options |= {"model": model.name, "preset": size, "lengths": lengths.tolist()}
    results = {
        ranks: measured(f"{name} on {ranks} ranks", partial(run_as_ranks, _RANK, ranks, options)) for ranks in sizes
    }
    stages = results[1]["stages"]
    work = Work(
        num_ids=int(lengths.sum()) * (2 + settings["num_negatives"]),
        num_items=settings["num_items"],
        dim=dim,
        num_parameters=results[1]["num_parameters"],
    )
    one = OneRank(stages["fetch"], stages["compute"] + stages["reduce"], stages["update"])
    seconds = {ranks: result["seconds"] for ranks, result in results.items()}
    cores = results[2]["core_rate"] / results[1]["core_rate"]
    negatives = settings["num_negatives"]
    return Measured(work, one, seconds, results[2]["links"], cores, max_len, sequences, model, negatives)


def _judge(name: str, found: Measured, ranks: int) -> list[Cell]:
    """Compare the simulated step of `ranks` ranks on this machine with the real one."""
    inside = Link(found.links["exchange_latency"], found.links["exchange_rate"])
    ring = Link(found.links["sum_latency"], found.links["sum_rate"])
    simulated = step_seconds(found.work, found.one, Cluster(1, ranks, inside, inside, ring)) * ranks_per_core(ranks)
    real = found.seconds[ranks]
    return [name, ranks, real, simulated, simulated / real - 1.0]


def _simulated_efficiency(found: Measured, size: int, settings: Mapping[str, Any]) -> float:
    cluster = cluster_of(size, found.links, settings)
    seconds = step_seconds(found.work, found.one, cluster, waiting=_waiting(found, size))
    return found.one.seconds / seconds


def cluster_of(size: int, links: Mapping[str, float], settings: Mapping[str, Any]) -> Cluster:
    """Return `size` ranks on machines of `node_size`: one group each, measured links inside, the network between."""
    members = min(size, settings["node_size"])
    if size % members:
        raise UserError(f"simulated={size} ranks do not fill machines of node_size={members}; give a multiple of it")
    inside = Link(links["exchange_latency"], links["exchange_rate"])
    rate = settings["network_gbps"] * 1e9 / 8
    across = Link(settings["network_latency"], rate / members)
    # A ring over machines has one stream per network link, and is not faster than the sum inside a machine.
    ring = Link(links["sum_latency"], links["sum_rate"])
    if size > members:
        ring = Link(max(settings["network_latency"], ring.latency), min(rate, ring.rate))
    return Cluster(size // members, members, inside, across, ring)


def _waiting(found: Measured, size: int) -> float:
    """Return the share of time that balanced ranks wait, with lengths like KuaiRand, over some steps."""
    batch = size * found.sequences
    lengths = lognormal(max(4, 4096 // batch) * batch, _MEDIAN, _MEAN, found.max_len, seed=1)
    cost = counted_cost(found.model, found.num_negatives)
    plan = plan_steps(lengths, world=size, batch_size=batch, strategy="reallocate", cost=cost)
    return wait_share(np.array([[cost.cost(lengths[part]).sum() for part in step] for step in plan]))


def _assumptions(settings: Mapping[str, Any]) -> str:
    return (
        f"simulated machines have {settings['node_size']} ranks, cores like this machine's, the bandwidth measured "
        f"here inside, {settings['network_gbps']:g} Gbit/s and {1e6 * settings['network_latency']:g} µs between them, "
        "no overlap"
    )
