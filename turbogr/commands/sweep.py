"""`turbogr sweep`: train recipes over variants and a grid of settings; write a table and a plot."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from turbogr.commands._plugins_option import add_plugins_option, load_given_plugins


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="train recipes over a grid of settings and compare the runs",
        description="Train every recipe with every combination of the grid's values and compare them: a table with the "
        "spread between seeds, and curves. Start it again with the same --out to continue after an interruption, to "
        "try failed runs again or to add values: finished runs stay.",
    )
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="name of a recipe, or a YAML file")
    parser.add_argument("--data", required=True, metavar="DIR", help="store written by `turbogr prepare`")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of all the runs")
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE,...",
        help="values of one setting, e.g. --grid train.seed=0,1,2; may be repeated for other settings",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME: SECTION.KEY=VALUE, ...",
        help="a named set of settings, e.g. --variant 'wide: model.dim=128, model.num_heads=4'; may "
        "be repeated, and each is trained with all of the grid",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change one value of every run; may be repeated",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many runs at a time (default: 1)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--dry-run", action="store_true", help="check everything, list the runs and start no run")
    only.add_argument("--compare-only", action="store_true", help="start no run and compare those that exist")
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from turbogr.config import find_recipe
    from turbogr.errors import UserError
    from turbogr.files import replace_text
    from turbogr.sweep import Outcome, cells_of, check, compare, misplaced, parse_axis, parse_variant, sweep

    load_given_plugins(args)
    variants = [parse_variant(variant) for variant in args.variant]
    cells = cells_of(
        [find_recipe(recipe) for recipe in args.recipes], [parse_axis(axis) for axis in args.grid], variants
    )
    if args.dry_run:
        waiting = check(cells, Path(args.data), args.out, args.overrides, jobs=args.jobs)
        print("\n".join(f"{cell.name}  {'to do' if cell in waiting else 'finished'}" for cell in cells))
        return 0
    outcome = Outcome({}, None)
    if not args.compare_only:
        outcome = sweep(
            cells, Path(args.data), args.out, overrides=args.overrides, jobs=args.jobs, plugins=args.plugins
        )
    others = misplaced(cells, Path(args.data), args.out, args.overrides)
    for cell, reasons in others.items():
        print(f"turbogr: note: {cell.name} is left out: it was {'; '.join(reasons)}", file=sys.stderr)
    comparison = compare([cell for cell in cells if cell not in others], args.out)
    if comparison is None and args.compare_only:
        why = "can be compared; the notes say why" if others else "has been evaluated yet; leave out --compare-only"
        raise UserError(f"no run of this sweep in {args.out} {why}")
    if comparison is not None:
        record = {"command": _command(), **comparison.record()}
        replace_text(args.out / "sweep.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
        replace_text(args.out / "sweep.svg", comparison.plot())
        print(f"\n{comparison.table().text()}\n")
        for note in comparison.notes():
            print(f"note: {note}")
        for protocol in record["protocols"]:
            print(f"protocol: {protocol}")
        print(f"record  {args.out / 'sweep.json'}\nplot    {args.out / 'sweep.svg'}")
    if outcome.signal is not None:
        print(f"interrupted; continue with: {_command()}", file=sys.stderr)
        return 128 + int(outcome.signal)
    for name, reason in outcome.failed.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0


def _command() -> str:
    return shlex.join(["turbogr", *sys.argv[1:]])
