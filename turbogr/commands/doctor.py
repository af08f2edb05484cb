"""`turbogr doctor`: what this machine is and what is worth fixing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from turbogr import doctor
from turbogr.files import check_writable, replace_text


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine is and what is worth fixing",
        description="Show in ten lines what this machine is, how fast it computes and what is worth fixing; "
        "--details adds all versions, and which backend runs each operator and why.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the facts as JSON")
    parser.add_argument("--details", action="store_true", help="show everything")
    parser.add_argument("--quick", action="store_true", help="skip measuring speed (a few seconds)")

    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.json is not None:
        check_writable(args.json, "--json")
    if not args.quick:
        print("measuring speed, a few seconds (--quick skips this) ...", file=sys.stderr, flush=True)
    facts = doctor.examine(measure=not args.quick)
    print(doctor.describe(facts) if args.details else doctor.summarise(facts))
    if args.json is not None:
        replace_text(args.json, json.dumps(facts, indent=2) + "\n")
    return 0
