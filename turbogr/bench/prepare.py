"""Preparing a Parquet log: events per second and peak memory as the log grows, beside pandas and polars.

The log is synthetic, with the length distribution of KuaiRand-27K. Every preparation runs in a process of its own,
whose peak memory is read at its end; the plain implementations in pandas and polars hold the whole log and are measured
only up to `reference_events`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbogr.bench import _preparing
from turbogr.bench._preparing import WAYS
from turbogr.bench.record import Cell, Result, Table
from turbogr.data.sources.synthetic import PRESETS, Synthetic, write_log
from turbogr.errors import UserError
from turbogr.report.charts import Axis, Series, line_chart

SETTINGS: dict[str, Any] = {
    "events": [1_000_000, 10_000_000, 100_000_000],
    "num_items": 10_000_000,
    "reference_events": 10_000_000,
    "folder": "",  # where the logs and stores are written; empty: the system's temporary folder
    "seed": 0,
}


def run(settings: Mapping[str, Any]) -> Result:
    """Measure every size; figures are `events_per_second_<size>` and `peak_memory_bytes_<size>`, size like 10m.

    `cpu_seconds_<size>` tells the work apart from what else the machine was doing.
    """
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    notes: list[str] = []
    missing = [way for way in WAYS if importlib.util.find_spec(way) is None]
    notes += [f"{way} is not installed" for way in missing]
    with tempfile.TemporaryDirectory(prefix="turbogr-bench-", dir=settings["folder"] or None) as name:
        for wanted in settings["events"]:
            log = Path(name, "log")
            events = write_log(_synthetic(wanted, settings), log)
            for way in WAYS:
                if way != "turbogr" and (wanted > settings["reference_events"] or way in missing):
                    continue
                measured = _measure(way, log, Path(name, "out"))
                if measured is None:
                    notes.append(f"{way} did not finish {events:,} events (out of memory?)")
                    continue
                rate, memory = events / measured["seconds"], measured["peak_memory"]
                prefix = "" if way == "turbogr" else f"{way}_"
                figures[f"{prefix}events_per_second_{_label(wanted)}"] = rate
                figures[f"{prefix}peak_memory_bytes_{_label(wanted)}"] = memory
                figures[f"{prefix}cpu_seconds_{_label(wanted)}"] = measured["cpu_seconds"]
                times = [round(measured[key], 2) for key in ("seconds", "cpu_seconds")]
                rows.append([way, events, *times, round(rate), round(memory / 2**20)])
            shutil.rmtree(log)
    columns = ["way", "events", "seconds", "CPU seconds", "events/s", "peak memory, MiB"]
    table = Table("preparing a Parquet log", columns, rows)
    return Result(figures, [table], {"prepare": _plot(rows)}, notes)


def _synthetic(events: int, settings: Mapping[str, Any]) -> Synthetic:
    preset = PRESETS["kuairand-27k"]
    num_users = max(round(events / preset["mean_length"]), 2)
    try:
        return Synthetic(
            **{**preset, "num_users": num_users, "num_items": settings["num_items"], "seed": settings["seed"]}
        )
    except UserError as error:
        raise UserError(f"bench prepare: {error}") from None


def _measure(way: str, log: Path, out: Path) -> dict[str, float] | None:
    """Prepare in a child process; None where it died, and its message where it failed in another way."""
    script = f"import runpy; runpy.run_path({_preparing.__file__!r}, run_name='__main__')"
    command = [sys.executable, "-c", script, way, str(log), str(out)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(out, ignore_errors=True)
    if child.returncode < 0:
        return None
    if child.returncode:
        raise UserError(f"bench prepare: {way} failed: {child.stderr.strip().splitlines()[-1]}")
    measured: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return measured


def _label(events: int) -> str:
    return f"{events // 10**6}m" if events % 10**6 == 0 else f"{events}"


def _plot(rows: list[list[Cell]]) -> str:
    series = []
    for way in WAYS:
        mine = [row for row in rows if row[0] == way]
        series.append(Series(way, [float(row[1] or 0) for row in mine], [float(row[5] or 0) for row in mine]))
    return line_chart(
        [one for one in series if one.x],
        title="Peak memory of preparing a Parquet log",
        x=Axis("events", log=True),
        y=Axis("MiB", log=True),
    )
