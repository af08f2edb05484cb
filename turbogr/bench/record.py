"""The one record that every benchmark writes, and what a benchmark returns.

The record is for programs: flat figures, and everything needed to judge or repeat them. Tables, plots and notes are for
people and are printed or saved beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from turbogr.errors import UserError, nearest
from turbogr.files import replace_text
from turbogr.machine import machine_facts, versions

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """A table for people: a title, the names of the columns and rows of as many cells (None: not measured)."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.title}: {len(row)} cells for {len(self.columns)} columns"

    def text(self) -> str:
        """Return the table as aligned plain text."""
        cells = [list(self.columns), *([_cell(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        numeric = [
            any(isinstance(row[i], (int, float)) for row in self.rows)
            and all(row[i] is None or isinstance(row[i], (int, float)) for row in self.rows)
            for i in range(len(self.columns))
        ]

        def line(row: list[str]) -> str:
            parts = (
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            )
            return "  ".join(parts).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, line(cells[0]), rule, *(line(row) for row in cells[1:])])


@dataclass(frozen=True)
class Result:
    """What a benchmark measured: `figures` by key; `tables`, `plots` (SVG text by name) and `notes` for people.

    A figure that this machine cannot measure is left out and a note says why.

    Raises:
        ValueError: a figure that is not a finite number.
    """

    figures: Mapping[str, float]
    tables: Sequence[Table] = ()
    plots: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for key, value in self.figures.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"figure '{key}' must be a finite number, got {value!r}; leave it out and add a note")


@dataclass(frozen=True)
class Record:
    """One benchmark run: its figures, and the machine, versions, command and settings they belong to."""

    name: str
    figures: dict[str, float]
    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    settings: dict[str, Any]

    def write(self, path: Path | str) -> None:
        """Write the record as JSON, aside and renamed."""
        replace_text(path, json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> Record:
        """Read a record written by `write`.

        Raises:
            UserError: the file is not there or is not a record.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**content)
        except FileNotFoundError:
            raise UserError(f"{path}: there is no such file; `turbogr bench NAME --json {path}` writes it") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: not a benchmark record ({error})") from None


def summarise(name: str, result: Result, settings: Mapping[str, Any], *, command: str = "") -> Record:
    """Return the record of `result`, with the facts of this machine."""
    figures = {key: float(value) for key, value in result.figures.items()}
    return Record(name, figures, machine_facts(), versions(), command, dict(settings))


def parse_settings(name: str, defaults: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return `defaults` with every "key=value" of `assignments` applied, each read as its default's type.

    A list takes YAML (`sizes=[1, 2]`) or comma-separated values; a default of None takes any YAML value.

    Raises:
        UserError: no "=", an unknown key (names the nearest), or a value of another type.
    """
    settings = dict(defaults)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: write key=value")
        if key not in defaults:
            known = ", ".join(defaults) or "none at all"
            hint = nearest(key, defaults)
            raise UserError(f"--set {assignment}: benchmark '{name}' has no setting '{key}', it has {known}.{hint}")
        settings[key] = _parse(assignment, text, defaults[key])
    return settings


def _parse(assignment: str, text: str, default: Any) -> Any:
    value = _read_yaml(assignment, text)
    if default is None:
        return value
    if isinstance(default, (list, tuple)):
        entries = value if isinstance(value, list) else [_read_yaml(assignment, part) for part in text.split(",")]
        return [_convert(assignment, entry, default[0]) if default else entry for entry in entries]
    return _convert(assignment, text if isinstance(default, str) else value, default)


def _read_yaml(assignment: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"--set {assignment}: cannot read the value '{text}'") from None


def _convert(assignment: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool) or isinstance(value, bool):
        fits = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, float):
        if isinstance(value, str):  # YAML 1.1 reads 1e6 as text
            value = _number(value)
        fits = isinstance(value, (int, float))
        value = float(value) if fits else value
    elif isinstance(default, int):
        number = _number(value) if isinstance(value, str) else value
        fits = isinstance(number, (int, float)) and float(number).is_integer()
        value = int(number) if fits else value
    else:
        fits = isinstance(value, type(default))
    if not fits:
        raise UserError(f"--set {assignment}: expected a value like {default!r}, got {value!r}")
    return value


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or (float(cell).is_integer() and abs(cell) >= 1000):
        return f"{int(cell):,}"
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
