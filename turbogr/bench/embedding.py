"""Jagged embedding against padded PyTorch with a sparse optimiser, and against FBGEMM's CPU table.

Claim: the input stage of a model is several times faster on real ids than on the padded batch.
Compared with: PyTorch as the public HSTU and SASRec code uses it; `nn.Embedding`; FBGEMM's CPU table.
Keys: `forward_speedup`, `backward_speedup` of the input stage, the same with `lookup_` for the look-up alone,
`forward_vs_fbgemm`, `backward_vs_fbgemm`, `bare_forward_speedup` and `bare_backward_speedup` of the look-up of one
table without finding distinct rows first, and `lookup_forward_speedup_tables_N`, `lookup_backward_speedup_tables_N`.

The paper's case: 1,064,960 ids of which 537,019 are padding. Three comparisons, each measurement in its own process:

- the input stage of a model: look-up, scale, position, dropout. PyTorch makes one pass after the other over the padded
  batch and masks the padding; ours is one pass over real ids. The backward goes from the gradient of the stage's output
  to the gradient of the positions and the updated table (Adagrad).
- the look-up with its update and nothing else, which is what FBGEMM's table does.
- the look-up of a batch whose ids, as many in all, are split over N features with a table each, against one
  `nn.Embedding` per table. Both sides run in turn in one process. The backward ends at the gradients, without update.

FBGEMM runs in its own environment with fbgemm-gpu-cpu==1.8.0 and the same torch; give its interpreter with
`--set fbgemm_python=PATH`, otherwise that comparison is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

from turbogr.bench import _embedding, _several_tables
from turbogr.bench._children import failure
from turbogr.bench._journal import CaseFailed, measured
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError
from turbogr.plot import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "num_ids": 1_064_960,
    "num_padding": 537_019,
    "max_len": 2048,
    "num_rows": 1_000_000,
    "width": 128,
    "dropout": 0.2,
    "tables": [1, 8, 32],  # numbers of tables that share num_ids and num_rows
    "repeats": 5,
    "threads": 0,  # 0: as many as torch uses
    "fbgemm_python": "",  # interpreter of an environment with fbgemm-gpu-cpu==1.8.0
}

_LABELS = {
    "padded_stage": "input stage, padded PyTorch",
    "our_stage": "input stage, ours",
    "padded_lookup": "look-up, padded nn.Embedding",
    "our_lookup": "look-up, ours",
    "fbgemm_lookup": "look-up, FBGEMM",
}


_SEVERAL_TABLES_NOTE = (
    "Several tables: both sides deliver a vector for every id, nn.Embedding for padding too. The backward goes from "
    "the gradients of the vectors to those of the tables. Ours is the sum for every distinct row of the batch; that of "
    "nn.Embedding is a tensor of the whole table (dense) or the sum for every distinct row (sparse, with coalesce()), "
    "whichever is faster. Ids and rows are as many in all at every number of tables."
)


class Timing(NamedTuple):
    """Seconds of the fastest forward and of the fastest backward with update."""

    forward: float
    backward: float


def run(settings: Mapping[str, Any]) -> Result:
    """Time all implementations.

    Raises:
        UserError: settings that leave no real id or no whole sequence, or an interpreter that cannot be started.
    """
    if not 0 <= settings["num_padding"] < settings["num_ids"] or settings["num_ids"] % settings["max_len"]:
        raise UserError("num_ids must be a multiple of max_len and larger than num_padding, which may be 0")
    most = min(settings["num_ids"] // settings["max_len"], settings["num_rows"])
    if any(not 1 <= number <= most for number in settings["tables"]):
        raise UserError(f"tables must be numbers from 1 to {most}, so that each has a sequence and a row")
    notes: list[str] = []
    timings = {way: _time(way, settings, sys.executable) for way in _LABELS if way != "fbgemm_lookup"}
    if settings["fbgemm_python"]:
        try:
            timings["fbgemm_lookup"] = _time("fbgemm_lookup", settings, settings["fbgemm_python"])
        except CaseFailed as error:
            notes.append(f"FBGEMM was not compared: {error}")
    else:
        notes.append("FBGEMM was not compared: give its interpreter with --set fbgemm_python=PATH")
    figures = _ratios("", timings["padded_stage"], timings["our_stage"], "speedup")
    figures |= _ratios("lookup_", timings["padded_lookup"], timings["our_lookup"], "speedup")
    if "fbgemm_lookup" in timings:
        figures |= _ratios("", timings["fbgemm_lookup"], timings["our_lookup"], "vs_fbgemm")
    several, table_of_tables = _compare_several_tables(settings)
    figures |= several
    rows: list[list[Cell]] = [[_LABELS[way], 1e3 * t.forward, 1e3 * t.backward] for way, t in timings.items()]
    title = f"{settings['num_ids']:,} ids, {settings['num_padding']:,} of them padding, width {settings['width']}"
    plot = grouped_bar_chart(
        ["forward", "backward and update"],
        {_LABELS[way]: [1e3 * t.forward, 1e3 * t.backward] for way, t in timings.items()},
        title=title,
        y=Axis("milliseconds", log=True),
    )
    table = Table(title, ["what", "forward ms", "backward and update ms"], rows)
    tables = [table]
    if settings["tables"]:
        tables.append(table_of_tables)
        notes.append(_SEVERAL_TABLES_NOTE)
    return Result(figures, tables, {"embedding": plot}, notes)


def _compare_several_tables(settings: Mapping[str, Any]) -> tuple[dict[str, float], Table]:
    """Compare the look-up in each number of tables with `nn.Embedding`; return the figures and a table of the times."""
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    for number in settings["tables"]:
        request = {"num_tables": number, "settings": dict(settings)}
        seconds = measured(f"{number} tables", partial(_run_script, _several_tables, request, sys.executable))
        row: list[Cell] = [number]
        for part in ("forward", "backward"):
            ours = seconds["ours"][part]
            kind, theirs = min(
                ((kind, seconds[kind][part]) for kind in ("dense", "sparse")), key=lambda found: median(found[1])
            )
            ratio = median(their / our for their, our in zip(theirs, ours, strict=True))
            figures[f"lookup_{part}_speedup_tables_{number}"] = ratio
            if "bare" in seconds:
                bare = seconds["bare"][part]
                figures[f"bare_{part}_speedup"] = median(their / our for their, our in zip(theirs, bare, strict=True))
            row += [1e3 * median(theirs), 1e3 * median(ours), ratio]
        rows.append([*row, kind])
    columns = ["tables", "forward ms", "ours", "speed-up", "backward ms", "ours", "speed-up", "its gradient"]
    return figures, Table("look-up in several tables, against one nn.Embedding per table", columns, rows)


def _ratios(prefix: str, theirs: Timing, ours: Timing, suffix: str) -> dict[str, float]:
    return {
        f"{prefix}forward_{suffix}": theirs.forward / ours.forward,
        f"{prefix}backward_{suffix}": theirs.backward / ours.backward,
    }


def _time(way: str, settings: Mapping[str, Any], python: str) -> Timing:
    """Measure one implementation in a process of the interpreter `python`; see `_run_script`."""
    request = {"way": way, "settings": dict(settings)}
    return Timing(**measured(_LABELS[way], lambda: _run_script(_embedding, request, python)))


def _run_script(script: ModuleType, request: Mapping[str, Any], python: str) -> dict[str, Any]:
    """Run a module as a script in a process of the interpreter `python`: JSON in, JSON out.

    Raises:
        MeasurementFailed: it failed; the message says why.
        UserError: the interpreter cannot be started.
    """
    command = f"import runpy; runpy.run_path({script.__file__!r}, run_name='__main__')"
    try:
        child = subprocess.run(
            [python, "-c", command], input=json.dumps(request), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(f"fbgemm_python: cannot start '{python}': {error.strerror}") from None
    if child.returncode:
        raise failure(child.stderr, child.returncode)
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found
