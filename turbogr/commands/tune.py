"""`turbogr tune`: search for better settings on one log within a given time; a recipe, a table and a run."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from turbogr.commands._plugins_option import add_plugins_option


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="search for better settings on a prepared store",
        description="Search for settings of a recipe that are better on the validation items, within a given time, and "
        "train the best. Writes OUT/recipe.yaml, OUT/tune.json and the run OUT/best. Start it again with the same "
        "--out to go on after an interruption, or with more --minutes to search further.",
    )
    parser.add_argument("data", metavar="DATA", help="store written by `turbogr prepare`")
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="N", help="time for all of it (default: %(default)g)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default: the store's name with -tune)"
    )
    parser.add_argument("--recipe", default="quickstart", metavar="RECIPE", help="where to start (default: quickstart)")
    parser.add_argument("--jobs", type=int, metavar="N", help="trials at a time (default: one a core, at most 4)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change one value of the recipe, which is then not searched; may be repeated",
    )
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    from turbogr.tuning.tuner import tune

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = tune(
        args.data,
        minutes=args.minutes,
        out=args.out,
        recipe=args.recipe,
        jobs=args.jobs,
        overrides=args.overrides,
        plugins=args.plugins,
        report=report,
    )
    print(f"\n{result.table}\n\n± is one standard error: how far the mean would vary with other users.")
    for note in result.notes:
        print(note)
    if result.signal is not None:
        again = shlex.join(["turbogr", *sys.argv[1:]])
        print(f"interrupted; continue with: {again}", file=sys.stderr)
        return 128 + int(result.signal)
    print(f"recipe  {result.recipe}\ntable   {result.out / 'tune.json'}\nrun     {result.run}")
    return 0
