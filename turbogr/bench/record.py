"""`Result`: what a benchmark returns. `Record`: the JSON file that it writes.

The record is for programs: flat figures, and everything needed to judge or repeat them. Tables, plots and notes are for
readers; they are printed or saved beside the record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turbogr.config import convert, read_value
from turbogr.errors import UserError, did_you_mean
from turbogr.files import replace_text
from turbogr.machine import machine_facts, versions

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """A printed table: a title, the names of the columns, and rows with one cell per column (None: not measured)."""

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
    """What a benchmark measured: `figures` by key; `tables`, `plots` (SVG text by name) and `notes` for readers.

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
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of `paper`: the claims, with what they are compared with."""

    def write(self, path: Path | str) -> None:
        """Write the record as JSON, atomically."""
        content = {key: value for key, value in asdict(self).items() if key != "rows" or value}
        replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n", follow_link=True)

    @classmethod
    def read(cls, path: Path | str) -> Record:
        """Read a record written by `write`.

        Raises:
            UserError: the file does not exist or is not a record.
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
            known = ", ".join(defaults) or "none"
            hint = did_you_mean(key, defaults)
            raise UserError(f"--set {assignment}: benchmark '{name}' has no setting '{key}', it has {known}.{hint}")
        settings[key] = _parse(key, text, defaults[key])
    return settings


def _parse(key: str, text: str, default: Any) -> Any:
    setting = f"{key}={text}"
    value = read_value(text, setting)
    if default is None:
        return value
    if isinstance(default, str):
        return text
    if isinstance(default, (list, tuple)):
        entries = value if isinstance(value, list) else [read_value(part, setting) for part in text.split(",")]
        return [convert(type(default[0]), entry, key, f"--set {setting}") for entry in entries] if default else entries
    return convert(type(default), value, key, f"--set {setting}")


def _cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or (float(cell).is_integer() and abs(cell) >= 1000):
        return f"{int(cell):,}"
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
