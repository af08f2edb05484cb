"""`turbogr chaos`: random faults against real training jobs, and what was lost."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from turbogr.errors import UserError

_KINDS = ("kill", "stop", "disk", "link", "nan")
_MOST_RANKS = 8


def add_parser(subparsers: Any) -> None:
    """Add `chaos` to the command line."""
    parser = subparsers.add_parser(
        "chaos",
        help="meet training jobs with random faults and compare what is left",
        description="Train small jobs of several ranks, meet them with random kills, stops, full disks, slow links and "
        "values that are not finite, resume every life, and compare the final weights with those of the same job "
        "undisturbed. Exit status 1 if a step is lost, a bit differs or a job hangs. Full disks and slow links are in "
        "namespaces of this command alone: nothing of the machine changes.",
    )
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="how many faults (default: 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the plan of all faults (default: 0)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of each job (default: two to four)")
    parser.add_argument("--steps", type=int, default=75, metavar="N", help="steps of each job (default: 75)")
    parser.add_argument(
        "--kinds", default=",".join(_KINDS), metavar="A,B", help=f"kinds of faults (default: {','.join(_KINDS)})"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the record to FILE; an interrupted command goes on there"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from turbogr.chaos.surroundings import enter

    kinds = _checked_kinds(args)
    if args.json is not None:
        from turbogr.files import check_writable

        args.json.absolute().parent.mkdir(parents=True, exist_ok=True)
        check_writable(args.json, "--json")
    enter(sys.argv[1:], kinds)
    from turbogr.chaos.chaos_record import Options, run_chaos
    from turbogr.files import replace_text

    options = Options(args.faults, args.seed, kinds, steps=args.steps)
    if args.ranks is not None:
        options = Options(args.faults, args.seed, kinds, (args.ranks,), args.steps)
    journal = None if args.json is None else args.json.with_name(f"{args.json.name}.partial")
    record = run_chaos(options, journal, lambda line: print(line, file=sys.stderr, flush=True))
    lost, different, hangs = record["lost_steps"], record["different_weights"], record["hangs"]
    kinds_text = ", ".join(f"{count} {kind}" for kind, count in record["by_kind"].items())
    print(f"{record['faults']} faults ({kinds_text}) in {record['num_jobs']} jobs with {record['num_lives']} lives")
    print(f"lost steps {lost}, jobs with different weights {different}, hangs {hangs}")
    for problem in record["problems"]:
        print(f"problem: {problem}")
    if args.json is not None:
        command = shlex.join(["turbogr", *sys.argv[1:]])
        replace_text(args.json, json.dumps({"command": command, **record}, indent=1) + "\n", follow_link=True)
        assert journal is not None
        journal.unlink(missing_ok=True)
        print(f"record  {args.json}")
    return 1 if lost or different or hangs or record["problems"] else 0


def _checked_kinds(args: argparse.Namespace) -> tuple[str, ...]:
    if not hasattr(os, "fork") or not sys.platform.startswith("linux"):
        raise UserError("turbogr chaos needs Linux")
    if args.faults < 1:
        raise UserError(f"--faults is {args.faults}; give at least 1")
    if args.steps < 10:
        raise UserError(f"--steps is {args.steps}; give at least 10, so that faults meet a job that trains")
    if args.ranks is not None and not 2 <= args.ranks <= _MOST_RANKS:
        raise UserError(f"--ranks is {args.ranks}; give 2 to {_MOST_RANKS}")
    kinds = tuple(dict.fromkeys(kind.strip() for kind in args.kinds.split(",") if kind.strip()))
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown or not kinds:
        raise UserError(f"--kinds names {unknown[0] if unknown else 'nothing'}; choose from {', '.join(_KINDS)}")
    return kinds
