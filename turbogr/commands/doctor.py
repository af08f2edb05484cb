"""`turbogr doctor`: what this machine is and which backend runs which operator."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from turbogr import doctor
from turbogr.files import check_writable, replace_text


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine is and which backend runs which operator",
        description="Show versions, devices, threads, which backend runs each operator and why, the measured peak of "
        "matrix products per precision, free memory and disk, and what is worth fixing.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the facts as JSON")
    parser.add_argument("--quick", action="store_true", help="skip measuring matrix products (about 20 seconds)")

    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.json is not None:
        check_writable(args.json, "--json")
    facts = doctor.examine(measure=not args.quick)
    print(doctor.describe(facts))
    if args.json is not None:
        replace_text(args.json, json.dumps(facts, indent=2) + "\n")
    return 0
