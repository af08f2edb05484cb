"""`turbogr bench`: run one benchmark, print its tables, save its record and plots."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from turbogr import bench
from turbogr.bench.record import Result, Table
from turbogr.errors import UserError
from turbogr.files import check_writable, replace_text


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="run a benchmark; without a name, list them",
        description="Run one benchmark: print its tables, and with --json save its record and its plots (SVG).",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which benchmark; leave it out to list them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE and the plots beside it")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="change a setting; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="of `paper`: write its records and its page to DIR")
    parser.add_argument("--quick", action="store_true", help="of `paper`: small sizes, 20 minutes on two cores")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.name is None:
        width = max(len(name) for name in bench.names())
        print("\n".join(f"{name:<{width}}  {bench.describe(name)}" for name in bench.names()))
        return 0
    if args.name == "paper":
        return _run_paper(args)
    if args.out is not None or args.quick:
        raise UserError(f"--out and --quick are options of `turbogr bench paper`; {args.name} takes --json FILE")
    if args.json is not None:
        _check_json_path(args.json)  # before the benchmark, which can take long
    journal = bench.Journal() if args.json is None else bench.open_journal(args.name, args.assignments, args.json)
    if journal.num_resumed:
        _note(f"{journal.num_resumed} cases are taken from {journal.path}, which an interrupted run has left")
    try:
        record, result = bench.run_benchmark(args.name, args.assignments, command=_command(), journal=journal)
    except BaseException:
        _say_what_is_kept(journal)
        raise
    tables = result.tables or [Table(record.name, ["figure", "value"], list(record.figures.items()))]
    print("\n\n".join(table.text() for table in tables))
    for note in result.notes:
        print(f"note: {note}")
    if args.json is not None:
        record.write(args.json)
        print(f"\nrecord  {args.json}")
        for path in _write_plots(result, args.json):
            print(f"plot    {path}")
        journal.close()
        if journal.failed:
            _note(f"the record is not complete; the same command measures what is missing: {', '.join(journal.failed)}")
    return 0


def _run_paper(args: argparse.Namespace) -> int:
    """Measure section after section; what is done stands in the folder at any moment."""
    from turbogr.bench import _paper_folder

    if args.json is not None:
        raise UserError(f"--json {args.json}: `turbogr bench paper` writes several records; name a folder with --out")
    assignments = [*(["quick=true"] if args.quick else []), *args.assignments]
    folder = args.out
    return _paper_folder.measure(folder, assignments, _command(), _note)


def _say_what_is_kept(journal: bench.Journal) -> None:
    if journal.num_kept and journal.path is None:
        _note(
            f"{journal.num_kept} measured cases are lost; with --json FILE they are kept, and the same command goes on"
        )
    elif journal.num_kept:
        _note(f"{journal.num_kept} measured cases are kept in {journal.path}; the same command measures the others")


def _note(text: str) -> None:
    print(f"turbogr: note: {text}", file=sys.stderr, flush=True)


def _command() -> str:
    return shlex.join(["turbogr", *sys.argv[1:]])


def _check_json_path(path: Path) -> None:
    if path.suffix == ".svg":
        raise UserError(f"--json {path}: the plot is written to the name ending in .svg; choose a name ending in .json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--json {path}: cannot create its folder ({error.strerror})") from None
    check_writable(path, "--json")


def _write_plots(result: Result, record: Path) -> list[Path]:
    """Write FILE.svg for one plot, FILE-<name>.svg for several; return the paths."""

    written = []
    for name, svg in result.plots.items():
        path = record.with_name(f"{record.stem}.svg" if len(result.plots) == 1 else f"{record.stem}-{name}.svg")
        replace_text(path, svg, follow_link=True)
        written.append(path)
    return written
