"""`turbogr doctor`: what this machine is and what is worth fixing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from turbogr import doctor
from turbogr.accelerators import available_accelerator, choose_device
from turbogr.errors import UserError
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
    parser.add_argument(
        "--accelerator",
        nargs="?",
        const="auto",
        metavar="NAME",
        help="check an accelerator instead, in about two minutes: every operator against float64 on the CPU, the same "
        "step twice, memory, rates, and two ranks if there are two devices; writes one JSON file to send back",
    )
    parser.add_argument(
        "--golden",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.npz",
        help="with --accelerator: also compare this golden file there; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="skip measuring speed (a few seconds)")

    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.json is not None:
        check_writable(args.json, "--json")
    if args.accelerator is not None:
        return _check_accelerator(args)
    if args.golden:
        raise UserError("--golden is compared on an accelerator; add --accelerator, or use `turbogr conformance FILE`")
    if not args.quick:
        print("measuring speed, a few seconds (--quick skips this) ...", file=sys.stderr, flush=True)
    facts = doctor.examine(measure=not args.quick)
    print(doctor.describe(facts) if args.details else doctor.summarise(facts))
    if args.json is not None:
        replace_text(args.json, json.dumps(facts, indent=2) + "\n", follow_link=True)
    return 0


def _check_accelerator(args: argparse.Namespace) -> int:
    """Check a device; exit status 1 if something is wrong."""
    from turbogr.accelerator_check import DEFAULT_FILE, check_accelerator, summarise

    if args.accelerator == "auto" and available_accelerator() is None:
        raise UserError(
            "--accelerator: torch finds no accelerator on this machine; install its driver and the torch that is built "
            "for it, or name a device, such as --accelerator=cuda:1"
        )
    device = choose_device(args.accelerator, setting="--accelerator")
    path = args.json or Path(DEFAULT_FILE)
    check_writable(path, "--json")
    found = check_accelerator(
        device, args.golden, say=lambda name: print(f"checking: {name} ...", file=sys.stderr, flush=True)
    )
    print(summarise(found))
    replace_text(path, json.dumps(found, indent=2) + "\n", follow_link=True)
    print(f"Written to {path}; please send it to us if something is wrong or faster than documented", file=sys.stderr)
    return 1 if found["failed"] else 0
