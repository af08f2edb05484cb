"""`turbogr report`: write a run as one self-contained HTML page."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path
from typing import Any

from turbogr.commands._plugins_option import add_plugins_option, load_given_plugins
from turbogr.report.page import write_report


def add_parser(subparsers: Any) -> None:
    """Add `report` to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="write a run as one self-contained HTML page, or compare several",
        description="Write a run's results, recommendations, learning curves, data and settings as one HTML page that "
        "needs no network. Several runs are compared on one page: metrics with confidence intervals, differences user "
        "by user, curves over each other, and the settings that differ. The first run is the one that others are "
        "compared with.",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folders, as written by turbogr train")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write it (default: RUN/report.html, for several runs comparison.html)",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="the store of a single run, if it was moved")
    parser.add_argument("--open", action="store_true", help="show it in the web browser")
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    load_given_plugins(args)
    path = write_report(args.folders, args.out, data=args.data)
    print(path)
    if args.open and not webbrowser.open(path.resolve().as_uri()):
        print(f"no web browser found; open {path} yourself", file=sys.stderr)
        return 1
    return 0
