"""The paper's evaluation, row by row: its figure and conditions, ours and ours, and how to repeat it.

Claim: what the TurboGR paper claims, and where we reach it, exceed it or fall short.
Compared with: the paper's figures, under the conditions named in each row.
Keys: `table1_P_mfu`, `table1_P_mfu_nominal`, `table1_P_scalability` of preset P; `figure2_speedup`,
`figure2_memory_saving`; `table2_forward`, `table2_backward`; `table3_imbalance_after_N` with N sequences per rank (per
cent); `table4_auto_regret`; `table5_exposed`; `table6_useful_computing_P`; `table7_saving_R` with R negatives;
`table8_SIZE_baseline_hr1000`, `table8_SIZE_shared_hr1000`; `simulator_error`. All but table 3's are fractions or
ratios.

`turbogr bench paper --out DIR` keeps the records (`DIR/paper.json` and one per section) and a page (`DIR/index.html`);
`--quick` measures everything at sizes that two cores manage in 20 minutes: tables 1 and 8 at tiny alone. A section that
fails is named and the others go on. Rows say what was measured, emulated (real communication, emulated network or
device) or simulated (arithmetic).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from turbogr.bench import _journal
from turbogr.bench._paper_attention import figure2
from turbogr.bench._paper_device import table6
from turbogr.bench._paper_memory import table7
from turbogr.bench._paper_mesh import table4
from turbogr.bench._paper_models import PAPER_CASES
from turbogr.bench._paper_parts import table2, table3, table5
from turbogr.bench._paper_rows import Measure, Part, Row, as_table
from turbogr.bench._paper_sharing import table8
from turbogr.bench._paper_simulator import simulator
from turbogr.bench._paper_steps import table1
from turbogr.bench.record import Result
from turbogr.config import PRESETS
from turbogr.errors import UserError, did_you_mean

SECTIONS: dict[str, Measure] = {
    "simulator": simulator,
    "table3": table3,
    "table2": table2,
    "table5": table5,
    "table4": table4,
    "table1": table1,
    "table8": table8,
    "figure2": figure2,
    "table6": table6,
    "table7": table7,
}
"""In the order of measuring: what takes longest and most memory comes last."""

_QUICK: dict[str, Any] = {"presets": ["hstu_tiny", "fuxi_tiny"], "sizes": ["tiny"], "seconds": 8.0}

SETTINGS: dict[str, Any] = {
    "sections": list(SECTIONS),
    "quick": False,  # small sizes where a setting below is not given
    "presets": list(PAPER_CASES),  # of table 1
    "sizes": ["tiny", "small", "medium"],  # of table 8
    "seconds": 20.0,  # of measured steps per case
    "epochs": 0,  # of table 8; 0: by size
}


def run(settings: Mapping[str, Any]) -> Result:
    """Measure all sections.

    Raises:
        UserError: an unknown section, preset or size, or no section that could be measured.
    """
    parts = {name: part for name, part, _ in measure_sections(settings)}
    if not any(part.rows for part in parts.values()):
        raise UserError("; ".join(note for part in parts.values() for note in part.notes) or "no section was asked for")
    return result_of(parts)


def measure_sections(settings: Mapping[str, Any]) -> Iterator[tuple[str, Part, float]]:
    """Yield (section, what it found, seconds) one by one; a section that fails has a note and is not complete."""
    check_settings(settings)
    settings = quick_settings(settings)
    for name, measure in SECTIONS.items():
        if name in settings["sections"]:
            part, started = Part(), time.perf_counter()
            try:
                with _journal.cases_of(name):
                    measure(settings, part)
            except _journal.CaseFailed as error:
                part.notes.append(f"{name} is not complete: {error}")
            yield name, part, time.perf_counter() - started


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown section, preset or size; name the nearest."""
    for key, known in (("sections", SECTIONS), ("presets", PAPER_CASES), ("sizes", PRESETS)):
        for name in settings[key]:
            if name not in known:
                choice = ", ".join(known)
                raise UserError(f"{key}: unknown '{name}', choose from {choice}.{did_you_mean(name, known)}")


def quick_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings; with `quick`, those that have their default values are the small ones."""
    if not settings["quick"]:
        return dict(settings)
    return {**settings, **{key: small for key, small in _QUICK.items() if settings[key] == SETTINGS[key]}}


def result_of(parts: Mapping[str, Part]) -> Result:
    """Return what all sections found together."""
    figures = {key: value for part in parts.values() for key, value in part.figures.items()}
    tables = [table for part in parts.values() for table in part.tables]
    notes = dict.fromkeys(note for part in parts.values() for note in part.notes)
    return Result(figures, [*tables, as_table(rows_of(parts))], notes=list(notes))


def rows_of(parts: Mapping[str, Part]) -> list[Row]:
    """Return the rows of all sections, in the paper's order."""
    return sorted((row for part in parts.values() for row in part.rows), key=lambda row: order_of({"key": row.key}))


def order_of(row: Mapping[str, Any]) -> tuple[int, str]:
    """Where a row stands: figures, tables by number, the simulator."""
    kind = row["key"].partition("_")[0]
    return ("figure", "table", "simulator").index(kind.rstrip("0123456789")), kind


def as_dicts(rows: list[Row], command: Callable[[Row], str], machine: str) -> list[dict[str, Any]]:
    """Return the rows as a record keeps them."""
    return [
        {
            **dataclasses.asdict(row),
            "ratio": row.ratio,
            "verdict": row.verdict,
            "command": command(row),
            "machine": machine,
        }
        for row in rows
    ]
