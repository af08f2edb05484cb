"""Preparing a Parquet log: events per second and peak memory by the size of the log, beside pandas, polars and DuckDB.

Claim: `turbogr prepare` needs memory for the distinct ids, not for the events.
Compared with: plain implementations of the same task in pandas, polars and DuckDB, up to `reference_events`.
Keys, with sizes like 10m: `events_per_second_<size>`, `peak_memory_bytes_<size>`, `cpu_seconds_<size>`,
`distinct_ids_<size>`; `..._fixed_ids_<size>` with a fixed number of distinct ids; `pandas_...` and so on.

The log is synthetic, with the length distribution of KuaiRand-27K. A longer log has more users and more of the
catalogue, and the distinct ids are held in memory. So a second series keeps the users and items fixed and gives each
user more events, which shows whether memory grows with the events. Every preparation runs in its own process, whose
peak memory is read at its end. `cpu_seconds` is not affected by other processes on the machine.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from turbogr.bench import _preparing
from turbogr.bench._children import failure
from turbogr.bench._journal import measured
from turbogr.bench._preparing import WAYS
from turbogr.bench.record import Cell, Result, Table
from turbogr.data.prepare.sources.event_generator import PRESETS, Synthetic
from turbogr.data.prepare.sources.synthetic import write_log
from turbogr.errors import UserError
from turbogr.plot import Axis, Series, line_chart

SETTINGS: dict[str, Any] = {
    "events": [1_000_000, 10_000_000, 100_000_000],
    "num_items": 10_000_000,
    "fixed_users": 8_000,
    "fixed_items": 100_000,
    "reference_events": 10_000_000,
    "folder": "",  # for the logs and stores; empty: the system's temporary folder
    "seed": 0,
}
_FIXED = "fixed ids"


def run(settings: Mapping[str, Any]) -> Result:
    """Measure every size with every implementation."""
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    notes: list[str] = []
    missing = [way for way in WAYS if importlib.util.find_spec(way) is None]
    notes += [f"{way} is not installed" for way in missing]
    with tempfile.TemporaryDirectory(prefix="turbogr-bench-", dir=settings["folder"] or None) as name:
        for size in settings["events"]:
            for fixed in (False, True):
                log = Path(name, "log")
                events = write_log(_synthetic(size, fixed, settings), log)
                for way in WAYS:
                    if way != "turbogr" and (fixed or size > settings["reference_events"] or way in missing):
                        continue
                    case = f"{way}, {_label(size)} events{', ' + _FIXED if fixed else ''}"
                    found = measured(case, partial(_measure, way, log, Path(name, "out")))
                    if isinstance(found, str):
                        notes.append(f"{way} did not finish {events:,} events: {found}")
                        continue
                    label = ("fixed_ids_" if fixed else "") + _label(size)
                    figures.update(_figures("" if way == "turbogr" else f"{way}_", label, events, found))
                    rows.append(_row(f"{way}, {_FIXED}" if fixed else way, events, found))
                shutil.rmtree(log)
    columns = ["way", "events", "distinct ids", "seconds", "CPU seconds", "events/s", "peak memory, MiB"]
    table = Table("preparing a Parquet log", columns, rows)
    return Result(figures, [table], {"prepare": _plot(rows)}, notes)


def _figures(prefix: str, label: str, events: int, measured: Mapping[str, float]) -> dict[str, float]:
    return {
        f"{prefix}events_per_second_{label}": events / measured["seconds"],
        f"{prefix}peak_memory_bytes_{label}": measured["peak_memory"],
        f"{prefix}cpu_seconds_{label}": measured["cpu_seconds"],
        f"{prefix}distinct_ids_{label}": measured["distinct_ids"],
    }


def _row(way: str, events: int, measured: Mapping[str, float]) -> list[Cell]:
    times = [round(measured[key], 2) for key in ("seconds", "cpu_seconds")]
    rate, memory = round(events / measured["seconds"]), round(measured["peak_memory"] / 2**20)
    return [way, events, int(measured["distinct_ids"]), *times, rate, memory]


def _synthetic(events: int, fixed: bool, settings: Mapping[str, Any]) -> Synthetic:
    """Return the log of a size: with more users, or with fixed users who have longer histories."""
    preset = dict(PRESETS["kuairand-27k"])
    if fixed:
        scale = events / settings["fixed_users"] / preset["mean_length"]
        for name in ("mean_length", "median_length"):
            preset[name] *= scale
        preset["max_length"] = max(round(preset["max_length"] * scale), 1)
        preset |= {"min_length": 1, "num_users": settings["fixed_users"], "num_items": settings["fixed_items"]}
    else:
        num_users = max(round(events / preset["mean_length"]), 2)
        preset |= {"num_users": num_users, "num_items": settings["num_items"]}
    try:
        return Synthetic(**{**preset, "seed": settings["seed"]})
    except UserError as error:
        raise UserError(f"bench prepare: {error}") from None


def _measure(way: str, log: Path, out: Path) -> dict[str, float] | str:
    """Prepare in a child process; return the figures, or why it did not finish (of other implementations than ours)."""
    script = f"import runpy; runpy.run_path({_preparing.__file__!r}, run_name='__main__')"
    command = [sys.executable, "-c", script, way, str(log), str(out)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(out, ignore_errors=True)
    if child.returncode < 0:
        return f"killed by signal {-child.returncode} (out of memory?)"
    if child.returncode:
        reason = child.stderr.strip().splitlines()[-1]
        if way == "turbogr":
            raise failure(child.stderr, child.returncode)
        return reason
    measured: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return measured


def _label(events: int) -> str:
    return f"{events // 10**6}m" if events % 10**6 == 0 else f"{events}"


def _plot(rows: list[list[Cell]]) -> str:
    series = []
    for way in dict.fromkeys(str(row[0]) for row in rows):
        mine = [row for row in rows if row[0] == way]
        series.append(Series(way, [float(row[1] or 0) for row in mine], [float(row[-1] or 0) for row in mine]))
    return line_chart(
        series,
        title="Peak memory of preparing a Parquet log",
        x=Axis("events", log=True),
        y=Axis("MiB", log=True),
    )
