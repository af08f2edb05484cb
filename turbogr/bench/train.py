"""Whole training steps, optimiser included: tokens/s, MFU and peak memory against our reference and RecTools.

Cases: `ml1m` (HSTU at d = 50, 2 blocks, one head, lengths as in MovieLens-1M), `d256` (4 blocks, 4 heads of 64,
lengths up to 1024), and the paper's presets with the lengths of KuaiRand-27K. Each runs in a process of its own. MFU
is against the best fp32 GEMM measured in the same run. RecTools needs an environment of its own; name its interpreter
with `--set rectools_python=PATH`, else that comparison is left out.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from turbogr.bench._training import Case, measure_in_child
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError, nearest
from turbogr.machine import gemm_peak
from turbogr.report.charts import Axis, bar_chart, grouped_bar_chart

PRESETS = tuple(
    f"{model}_{size}" for model in ("hstu", "fuxi") for size in ("tiny", "small", "medium", "large", "long")
)
CASES = ("ml1m", "d256", *PRESETS)

SETTINGS: dict[str, Any] = {
    "cases": list(CASES),
    "seconds": 15.0,  # of measured steps per case, after one that warms up
    "reference": True,  # also measure ml1m and d256 on the reference operators
    "rectools_python": "",  # interpreter of an environment with rectools[torch]==0.19.0
    "threads": 0,  # 0: as many as torch uses
}

_PRESET_BATCH = {"tiny": 8, "small": 4, "medium": 2, "large": 1, "long": 1}


def run(settings: Mapping[str, Any]) -> Result:
    """Measure `cases`; figures carry the case's name, e.g. `ml1m_tokens_per_second`, `hstu_large_mfu_strict`."""
    for name in settings["cases"]:
        if name not in CASES:
            raise UserError(f"cases: unknown '{name}', choose from {', '.join(CASES)}.{nearest(name, CASES)}")
    threads = settings["threads"] or torch.get_num_threads()
    peak = gemm_peak(torch.float32, threads)
    figures: dict[str, float] = {"gemm_peak_gflops": peak / 1e9}
    rows: list[list[Cell]] = []
    notes: list[str] = []
    plots: dict[str, str] = {}
    tables: list[Table] = []
    for name in settings["cases"]:
        case = dataclasses.replace(_case(name), seconds=settings["seconds"], threads=threads, profile=True)
        measured = measure_in_child(case)
        strict = measured["strict_flops_per_second"] / peak
        nominal = measured["nominal_flops_per_second"] / peak
        rows.append([name, measured["tokens_per_second"], strict, nominal, measured["peak_memory_bytes"] / 2**20])
        figures[f"{name}_tokens_per_second"] = measured["tokens_per_second"]
        figures[f"{name}_mfu_strict"] = strict
        figures[f"{name}_mfu_nominal"] = nominal
        figures[f"{name}_peak_memory_bytes"] = measured["peak_memory_bytes"]
        tables.append(_profile_table(name, measured["profile"]))
        if name in ("ml1m", "d256") and settings["reference"]:
            slow = measure_in_child(dataclasses.replace(case, backend="reference", profile=False, min_steps=1))
            figures[f"{name}_vs_reference"] = measured["tokens_per_second"] / slow["tokens_per_second"]
            memory = slow["peak_memory_bytes"] / 2**20
            rows.append([f"{name}, reference operators", slow["tokens_per_second"], None, None, memory])
    if "ml1m" in settings["cases"]:
        speed = _rectools(settings, notes)
        if speed is not None:
            figures["ml1m_vs_rectools"] = figures["ml1m_tokens_per_second"] / speed
            rows.append(["ml1m, RecTools HSTUModel", speed, None, None, None])
    columns = ["case", "tokens/s", "MFU strict", "MFU nominal", "peak MiB above idle"]
    title = f"Training steps, {threads} threads, GEMM peak {peak / 1e9:.0f} GFLOP/s"
    plots["train-mfu"] = grouped_bar_chart(
        list(settings["cases"]),
        {
            "strict": [figures[f"{name}_mfu_strict"] for name in settings["cases"]],
            "nominal": [figures[f"{name}_mfu_nominal"] for name in settings["cases"]],
        },
        title="Model FLOPs utilisation",
        y=Axis("share of the measured fp32 GEMM peak", zero=True),
    )
    speeds = {str(row[0]): float(row[1]) for row in rows if str(row[0]).startswith("ml1m") and row[1] is not None}
    if speeds:
        plots["train-ml1m"] = bar_chart(speeds, title="ML-1M HSTU training", axis=Axis("tokens/s", zero=True))
    return Result(figures, [Table(title, columns, rows), *tables], plots, notes)


def _case(name: str) -> Case:
    if name == "ml1m":
        model = {"dim": 50, "num_blocks": 2, "num_heads": 1, "max_len": 200, "dropout": 0.2}
        return Case(model, num_items=3706, batch_size=128, median_length=96, sigma=1.11, shortest=18)
    if name == "d256":
        model = {"dim": 256, "num_blocks": 4, "num_heads": 4, "max_len": 1024, "dropout": 0.2}
        return Case(model, num_items=20_000, batch_size=16, median_length=320, sigma=0.8, shortest=5)
    family, _, size = name.partition("_")
    preset: dict[str, Any] = {"name": {"hstu": "hstu", "fuxi": "fuxi-gamma"}[family], "preset": size, "dropout": 0.5}
    return Case(preset, num_items=100_000, batch_size=_PRESET_BATCH[size], median_length=8591, sigma=0.796, shortest=5)


def _profile_table(name: str, profile: Mapping[str, float]) -> Table:
    total = sum(profile.values())
    rows: list[list[Cell]] = [[key, value, value / total] for key, value in profile.items()]
    return Table(f"Where a step of {name} spends its time", ["operator", "ms", "share"], rows)


def _rectools(settings: Mapping[str, Any], notes: list[str]) -> float | None:
    """Tokens/s of RecTools' HSTUModel on the lengths of ml1m, or None with a note that says why."""
    python = settings["rectools_python"]
    if not python:
        notes.append("RecTools is not compared: name its interpreter with --set rectools_python=PATH")
        return None
    script = Path(__file__).with_name("_rectools.py")
    case = dataclasses.asdict(_case("ml1m")) | {"threads": settings["threads"]}
    done = subprocess.run([python, str(script)], input=json.dumps(case), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        notes.append(f"RecTools failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no output'}")
        return None
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])
