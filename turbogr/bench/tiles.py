"""Tile sizes of attention: how far the built-in choice is from the best of several, by head size and length.

Claim: the built-in tile sizes are close to the best at every shape.
Compared with: builds of the same kernels with other tile sizes.
Keys: `builtin_vs_best_d<head>_n<length>` (1 is best) and `worst`.

Two numbers decide how attention is cut: the side of a block (csrc/tile_gemm.h), which depends on the length, and the
floats that a task keeps in cache (csrc/attention_plan.h), from which the numbers of heads and of rows per task follow.
Each candidate is its own build of the kernels, so this needs the source tree and a compiler; one number is varied at a
time. Blocks must be multiples of the micro-tile, which depends on the instruction set; others are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import turbogr
from turbogr.bench._children import failure
from turbogr.bench._journal import measured
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError
from turbogr.ops import native
from turbogr.plot import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "blocks": [48, 96, 192],  # each for all lengths; the built-in choice is 48 or 96, depending on the length
    "task_floats": [32768, 131072],
    "head_dims": [16, 32, 64, 128],
    "lengths": [200, 1024, 4096],
    "tokens": 16384,
    "heads": 4,
    "repeats": 3,
    "rounds": 3,
    "threads": 0,  # 0: as many as torch uses
}

_BUILT_IN = "built in"


class Candidate(NamedTuple):
    """A name, and the compiler definitions that differ from the built-in ones."""

    name: str
    defines: str


def run(settings: Mapping[str, Any]) -> Result:
    """Measure every candidate at every shape.

    Raises:
        UserError: no source tree, or no kernels.
    """
    root = Path(turbogr.__file__).parents[1]
    if not (root / "csrc").is_dir() or not (root / "setup.py").is_file():
        raise UserError("bench tiles builds the kernels; run it from TurboGR's source tree")
    shapes = [(head_dim, length) for head_dim in settings["head_dims"] for length in settings["lengths"]]
    variables: dict[str, dict[str, str]] = {_BUILT_IN: {}}
    seconds: dict[str, list[float]] = {}
    notes = []
    with tempfile.TemporaryDirectory(prefix="turbogr-tiles-") as folder:
        for candidate in _candidates(settings):
            try:
                library = _build(candidate, root, Path(folder) / candidate.name.replace(" ", "-"))
            except RuntimeError as error:
                notes.append(f"{candidate.name} was left out: {error}")
                continue
            variables[candidate.name] = {"TURBOGR_KERNELS": str(library)}
        for number in range(settings["rounds"]):  # in turn, so that other load on the machine affects all equally
            for name, environment in variables.items():
                work = partial(_measure, shapes, settings, environment)
                times = measured(f"{name}, round {number + 1}", work)
                seconds[name] = [min(pair) for pair in zip(times, seconds.get(name, times), strict=True)]
    return _result(shapes, seconds, notes)


def _candidates(settings: Mapping[str, Any]) -> list[Candidate]:
    blocks = [Candidate(f"block {side}", f"-DTURBOGR_BLOCK={side}") for side in settings["blocks"]]
    tasks = [Candidate(f"task {floats}", f"-DTURBOGR_TASK_FLOATS={floats}") for floats in settings["task_floats"]]
    return blocks + tasks


def _build(candidate: Candidate, root: Path, folder: Path) -> Path:
    """Build the kernels for the instruction set in use.

    Raises:
        RuntimeError: the build failed.
    """
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", f"{folder}.o"]
    variables = {"TURBOGR_DEFINES": candidate.defines, "TURBOGR_BUILD_ISA": native.isa()}
    built = subprocess.run(
        command, cwd=root, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    library = folder / "turbogr" / "ops" / "_kernels.so"
    if built.returncode or not library.exists():
        errors = [line for line in built.stderr.splitlines() if "error" in line] or ["the build failed"]
        raise RuntimeError(errors[0].strip())
    return library


def _measure(shapes: list[tuple[int, int]], settings: Mapping[str, Any], environment: dict[str, str]) -> list[float]:
    request = {key: settings[key] for key in ("tokens", "heads", "repeats", "threads")} | {"shapes": shapes}
    child = subprocess.run(
        [sys.executable, "-m", "turbogr.bench._tiles"],
        env={**os.environ, "TURBOGR_ISA": native.isa(), **environment},
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise failure(child.stderr, child.returncode)
    seconds: list[float] = json.loads(child.stdout.splitlines()[-1])
    return seconds


def _result(shapes: list[tuple[int, int]], seconds: Mapping[str, list[float]], notes: list[str]) -> Result:
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    for number, (head_dim, length) in enumerate(shapes):
        times = {name: column[number] for name, column in seconds.items()}
        best = min(times, key=lambda name: times[name])
        ratio = times[_BUILT_IN] / times[best]
        figures[f"builtin_vs_best_d{head_dim}_n{length}"] = ratio
        rows.append([head_dim, length, *(1e3 * value for value in times.values()), best, ratio])
    figures["worst"] = max(figures.values())
    columns = ["head", "length", *(f"{name} ms" for name in seconds), "best", "built in / best"]
    plot = grouped_bar_chart(
        [f"{head_dim} × {length}" for head_dim, length in shapes],
        {name: [value / base for value, base in zip(column, seconds[_BUILT_IN], strict=True)]
         for name, column in seconds.items()},
        title="Time of attention by tile sizes",
        x_label="head size × length",
        y=Axis("relative to the built-in choice", zero=True),
        width=max(560, 80 * len(shapes)),
    )  # fmt: skip
    return Result(figures, [Table("Forward and backward of HSTU attention", columns, rows)], {"tiles": plot}, notes)
