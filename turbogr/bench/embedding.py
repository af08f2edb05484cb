"""Jagged embedding against padded PyTorch with a sparse optimiser, and against FBGEMM's CPU table.

The paper's case: 1,064,960 ids of which 537,019 are padding. Two comparisons, each measurement in a process of its own:

- the input stage of a model: look-up, scale, position, dropout. PyTorch does it as the public HSTU and SASRec code
  does, one pass after the other over the padded batch, and masks the padding; ours is one pass over real ids. Backward
  takes the gradient of the stage's output to the gradient of the positions and the updated table (Adagrad).
- the bare look-up with its update, which is all that FBGEMM's table does.

FBGEMM runs in an environment of its own with fbgemm-gpu-cpu==1.8.0 and the same torch; name its interpreter with
`--set fbgemm_python=PATH`, else that comparison is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from turbogr.bench import _embedding
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError
from turbogr.report.charts import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "num_ids": 1_064_960,
    "num_padding": 537_019,
    "max_len": 2048,
    "num_rows": 1_000_000,
    "width": 128,
    "dropout": 0.2,
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


class Timing(NamedTuple):
    """Seconds of the fastest forward and of the fastest backward with update."""

    forward: float
    backward: float


def run(settings: Mapping[str, Any]) -> Result:
    """Time all ways; figures are `forward_speedup` and `backward_speedup` of the stage, `lookup_*`, `*_vs_fbgemm`.

    Raises:
        UserError: settings that leave no real id or no whole sequence, or an interpreter that cannot be started.
    """
    if not 0 <= settings["num_padding"] < settings["num_ids"] or settings["num_ids"] % settings["max_len"]:
        raise UserError("num_ids must be a multiple of max_len and larger than num_padding, which may be 0")
    notes: list[str] = []
    timings = {way: _time(way, settings, sys.executable) for way in _LABELS if way != "fbgemm_lookup"}
    if settings["fbgemm_python"]:
        try:
            timings["fbgemm_lookup"] = _time("fbgemm_lookup", settings, settings["fbgemm_python"])
        except RuntimeError as error:
            notes.append(f"FBGEMM was not compared: {error}")
    else:
        notes.append("FBGEMM was not compared: name its interpreter with --set fbgemm_python=PATH")
    figures = _ratios("", timings["padded_stage"], timings["our_stage"], "speedup")
    figures |= _ratios("lookup_", timings["padded_lookup"], timings["our_lookup"], "speedup")
    if "fbgemm_lookup" in timings:
        figures |= _ratios("", timings["fbgemm_lookup"], timings["our_lookup"], "vs_fbgemm")
    rows: list[list[Cell]] = [[_LABELS[way], 1e3 * t.forward, 1e3 * t.backward] for way, t in timings.items()]
    title = f"{settings['num_ids']:,} ids, {settings['num_padding']:,} of them padding, width {settings['width']}"
    plot = grouped_bar_chart(
        ["forward", "backward and update"],
        {_LABELS[way]: [1e3 * t.forward, 1e3 * t.backward] for way, t in timings.items()},
        title=title,
        y=Axis("milliseconds", log=True),
    )
    table = Table(title, ["what", "forward ms", "backward and update ms"], rows)
    return Result(figures, [table], {"embedding": plot}, notes)


def _ratios(prefix: str, theirs: Timing, ours: Timing, suffix: str) -> dict[str, float]:
    return {
        f"{prefix}forward_{suffix}": theirs.forward / ours.forward,
        f"{prefix}backward_{suffix}": theirs.backward / ours.backward,
    }


def _time(way: str, settings: Mapping[str, Any], python: str) -> Timing:
    """Measure in a process of `python`.

    Raises:
        RuntimeError: it failed; the message is the last line it printed.
        UserError: there is no such interpreter.
    """
    script = f"import runpy; runpy.run_path({_embedding.__file__!r}, run_name='__main__')"
    request = json.dumps({"way": way, "settings": dict(settings)})
    try:
        child = subprocess.run([python, "-c", script], input=request, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"fbgemm_python: cannot start '{python}': {error.strerror}") from None
    if child.returncode:
        said = child.stderr.strip().splitlines() or [f"the process ended with {child.returncode}"]
        raise RuntimeError(said[-1])
    return Timing(**json.loads(child.stdout.splitlines()[-1]))
