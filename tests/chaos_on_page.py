"""What docs/results/reliability.md says about docs/results/chaos.json, and about its absence.

`python -m tests.chaos_on_page` writes it into the page, between the command and what has been found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbogr.chaos.fault_plan import KINDS

RESULTS = Path(__file__).parents[1] / "docs/results"
PAGE, RECORD = RESULTS / "reliability.md", RESULTS / "chaos.json"
FOUND = "What random faults have found is fixed, each with a test:"

_MISSING = "**A record of one hundred faults with this release is missing.**"


def chaos_text(record: Mapping[str, Any] | None) -> str:
    """The page's sentences and table about a record; None: there is none."""
    if record is None:
        return _MISSING
    lines = [
        f"**{_counted(record['faults'], 'fault')}: {_counted(record['lost_steps'], 'step')} lost, "
        f"{_counted(record['different_weights'], 'job')} with different weights, {_counted(record['hangs'], 'hang')}** "
        f"and {_counted(len(record['problems']), 'problem')} of any kind ([record](chaos.json), "
        f"seed {record['seed']}). {_counted(record['num_jobs'], 'job')} of {record['steps_per_job']} steps had "
        f"{_counted(record['num_lives'], 'life')}, of which {record['lives_from_survivors']} went on from what the "
        "remaining ranks had kept.",
        "",
        "| fault | times | begun inside a save |",
        "|---|---|---|",
    ]
    struck = [fault for job in record["jobs"] for fault in job["struck"]]
    for kind, times in sorted(record["by_kind"].items()):
        saving = sum(fault["kind"] == kind and fault.get("while") == "saving" for fault in struck)
        lines.append(f"| {KINDS[kind]} | {times} | {saving} |")
    return "\n".join(lines)


def _counted(number: int, what: str) -> str:
    many = {"life": "lives"}.get(what, f"{what}s")
    return f"{number} {what if number == 1 else many}"


def read_record() -> dict[str, Any] | None:
    """The record beside the page, None without one."""
    if not RECORD.exists():
        return None
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def parts_of_page(page: str) -> tuple[str, str, str]:
    """The page before, in and after what it says about the record."""
    before, section = page.split("## Random faults\n\n")
    command, rest = section.split("\n\n", 1)
    said, after = rest.split(f"\n\n{FOUND}")
    return f"{before}## Random faults\n\n{command}\n\n", said, f"\n\n{FOUND}{after}"


if __name__ == "__main__":
    start, _, end = parts_of_page(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(start + chaos_text(read_record()) + end, encoding="utf-8")
