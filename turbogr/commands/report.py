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
        help="write a run as one self-contained HTML page",
        description="Write a run's results, learning curves, data and settings as one HTML page that needs no network.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder, as written by turbogr train")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: RUN/report.html)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the store of the run, if it was moved")
    parser.add_argument("--open", action="store_true", help="show it in the web browser")
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    load_given_plugins(args)
    path = write_report(args.folder, args.out, data=args.data)
    print(path)
    if args.open and not webbrowser.open(path.resolve().as_uri()):
        print(f"no web browser found; open {path} yourself", file=sys.stderr)
        return 1
    return 0
