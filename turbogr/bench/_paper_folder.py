"""The folder of `turbogr bench paper`: a record per section, one of all, and a page; complete after every section."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jinja2

from turbogr import bench
from turbogr.bench import paper
from turbogr.bench._journal import Journal, using
from turbogr.bench._paper_rows import Part, Row, as_table
from turbogr.bench.record import Record, summarise
from turbogr.errors import UserError
from turbogr.files import check_writable, replace_text
from turbogr.machine import machine_facts

_PAGE = Path(__file__).with_name("paper.html")
_UNFINISHED = "unfinished"


def measure(folder: Path | None, assignments: list[str], command: str, note: Callable[[str], None]) -> int:
    """Measure all sections that are asked for and print their tables; return the exit status, 1 if a row is missing.

    With a `folder`, an interrupted measurement goes on there.

    Raises:
        UserError: an unknown setting, a folder that cannot be written, or one with another unfinished measurement.
    """
    settings = bench.settings_of("paper", assignments)
    paper.check_settings(settings)
    journal = Journal()
    if folder is not None:
        try:
            (folder / _UNFINISHED).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder}: cannot create this folder ({error.strerror})") from None
        check_writable(folder / "paper.json", "--out")
        journal = bench.open_journal("paper", assignments, folder / _UNFINISHED / "paper.json")
        if journal.num_resumed:
            note(f"{journal.num_resumed} cases are taken from {journal.path}, which an interrupted run has left")
    parts: dict[str, Part] = {}
    asked = [name for name in paper.SECTIONS if name in settings["sections"]]
    started = time.perf_counter()
    with using(journal):
        sections = paper.measure_sections(settings)
        while len(parts) < len(asked):
            name = asked[len(parts)]
            elapsed = (time.perf_counter() - started) / 60
            print(
                f"{name}, {len(parts) + 1} of {len(asked)}, {elapsed:.1f} minutes so far", file=sys.stderr, flush=True
            )
            try:
                name, parts[name], _ = next(sections)
            except BaseException:
                if journal.path is not None and journal.num_kept:
                    note(f"{journal.num_kept} measured cases are kept in {journal.path}; the same command goes on")
                raise
            print("\n\n".join(table.text() for table in parts[name].tables), end="\n\n", flush=True)
            for text in parts[name].notes:
                print(f"note: {text}")
            if folder is not None:
                _write(folder, parts, name, settings, command)
    print(as_table(paper.rows_of(parts)).text())
    if folder is not None:
        print(f"\nrecord  {folder / 'paper.json'}\npage    {folder / 'index.html'}")
        journal.close()
        if not journal.failed:
            (folder / _UNFINISHED).rmdir()
    if journal.failed:
        note(f"rows are missing; the same command measures what could not be measured: {', '.join(journal.failed)}")
    return 1 if journal.failed else 0


def _write(folder: Path, parts: dict[str, Part], last: str, settings: dict[str, object], command: str) -> None:
    machine = machine_facts()
    name = ", ".join(str(machine[key]) for key in ("processor", "cores") if key in machine)

    def repeat(row: Row) -> str:
        quick = " --quick" if settings["quick"] else ""
        return " ".join([f"turbogr bench paper{quick} --out {folder}", *(f"--set {text}" for text in row.settings)])

    def record(chosen: dict[str, Part]) -> Record:
        found = summarise("paper", paper.result_of(chosen), settings, command=command)
        found.rows.extend(paper.as_dicts(paper.rows_of(chosen), repeat, name))
        return found

    record({last: parts[last]}).write(folder / f"{last}.json")
    whole = _with_earlier(record(parts), folder, parts)
    whole.write(folder / "paper.json")
    tables = [table for part in parts.values() for table in part.tables]
    notes = dict.fromkeys(text for part in parts.values() for text in part.notes)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    replace_text(
        folder / "index.html",
        page.render(record=whole, tables=tables, notes=list(notes), text=lambda table: table.text(), number=_number),
    )


def _with_earlier(whole: Record, folder: Path, parts: dict[str, Part]) -> Record:
    """Add the sections that were measured earlier in this folder, on this machine with these versions."""
    rows = list(whole.rows)
    for name in paper.SECTIONS:
        path = folder / f"{name}.json"
        if name in parts or not path.exists():
            continue
        earlier = Record.read(path)
        if (earlier.machine, earlier.versions) == (whole.machine, whole.versions):
            whole.figures.update({key: value for key, value in earlier.figures.items() if key not in whole.figures})
            rows += earlier.rows
    return dataclasses.replace(whole, rows=sorted(rows, key=paper.order_of))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
