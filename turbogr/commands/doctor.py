"""`turbogr doctor`: what this machine is and which backend serves which operator."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from turbogr import doctor
from turbogr.files import check_target, replace_text


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine is and which backend serves which operator",
        description="Show versions, devices, threads, who serves which operator and why, the measured peak of matrix "
        "products per precision, free memory and disk, and what is worth mending.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the facts as JSON too")
    parser.add_argument("--quick", action="store_true", help="do not measure matrix products (about 20 seconds)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.json is not None:
        check_target(args.json, "--json")
    facts = doctor.examine(measure=not args.quick)
    print(doctor.describe(facts))
    if args.json is not None:
        replace_text(args.json, json.dumps(facts, indent=2) + "\n")
    return 0
