"""`turbogr conformance`: compare our models with a golden file, or write one for others to compare with."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from turbogr.config import MAX_TIME_BUCKETS, ModelConfig
from turbogr.errors import UserError
from turbogr.files import check_target
from turbogr.models.golden import TOLERANCE, Difference, Golden, write_golden
from turbogr.models.retrieval import BLOCKS
from turbogr.ops import registry

_SIZES = {
    "dim": (32, 1, 2**14, "width of the model"),
    "num-blocks": (2, 1, 2**10, "number of blocks"),
    "num-heads": (2, 1, 2**10, "heads per block"),
    "max-len": (25, 2, 2**16, "longest sequence, and N of the 1/N normaliser"),
    "num-time-buckets": (128, 1, MAX_TIME_BUCKETS, "time buckets besides the first"),
    "ffn-multiplier": (2, 1, 2**4, "width of the feed-forward part in model widths"),
}
"""Default, least and largest value, and meaning of the sizes of a file to be written."""


def add_parser(subparsers: Any) -> None:
    """Add `conformance` to the command line."""
    parser = subparsers.add_parser(
        "conformance",
        help="compare a model with a golden file, or write one",
        description="Run our model on the parameters and input of a golden file and compare the output and every "
        "gradient; exit status 1 when one is too far off. With --write, make such a file from our model, so that "
        "other implementations can be compared with it. docs/models/conformance.md has the layout.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.npz", help="golden file to read, or to write with --write")
    parser.add_argument(
        "--backend",
        choices=["all", *registry.CHOICES],
        default="auto",
        help="which backend serves the operators; all compares every one that runs here (default: auto)",
    )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"largest relative error (default: {TOLERANCE:g})"
    )
    writing = parser.add_argument_group("writing")
    writing.add_argument("--write", action="store_true", help="write FILE.npz instead of reading it")
    writing.add_argument("--model", choices=list(BLOCKS), default="hstu", help="which model (default: hstu)")
    writing.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    for name, (default, _, _, meaning) in _SIZES.items():
        writing.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    writing.add_argument("--seed", type=int, default=0, help="of the random parameters and input (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if not (math.isfinite(args.tolerance) and args.tolerance >= 0):
        raise UserError(f"--tolerance is {args.tolerance:g}; give a number of 0 or more, such as {TOLERANCE:g}")
    if args.write:
        return _write(args)
    golden = Golden.read(args.file)
    names = [name for name in registry.CHOICES if _runs(name)] if args.backend == "all" else [args.backend]
    columns: dict[str, list[Difference]] = {}
    for name in names:
        with registry.backend(name):
            columns[name] = golden.compare()
    print(_table(columns, args.tolerance))
    worst = max(row.error for rows in columns.values() for row in rows)
    sizes = golden.config
    what = f"{sizes.name}, {sizes.num_blocks} blocks of width {sizes.dim}"
    if worst > args.tolerance:
        print(f"{what}: NOT the same; the largest relative error is {worst:.1e}, above {args.tolerance:g}")
        return 1
    print(f"{what}: the same; the largest relative error is {worst:.1e}, at most {args.tolerance:g} is allowed")
    return 0


def _write(args: argparse.Namespace) -> int:
    for name, (_, least, largest, _) in _SIZES.items():
        value = getattr(args, name.replace("-", "_"))
        if not least <= value <= largest:
            raise UserError(f"--{name} is {value}; give a whole number from {least} to {largest:,}")
    if args.seed < 0:
        raise UserError(f"--seed is {args.seed}; give a whole number of 0 or more")
    check_target(args.file, "the golden file")
    if os.path.lexists(args.file) and not args.overwrite:
        raise UserError(f"{args.file} already exists; name another file or pass --overwrite")
    config = ModelConfig(
        name=args.model,
        dim=args.dim,
        num_blocks=args.num_blocks,
        num_heads=args.num_heads,
        max_len=args.max_len,
        num_time_buckets=args.num_time_buckets,
        ffn_multiplier=args.ffn_multiplier,
        dropout=0.0,
    )
    config.check()
    with registry.backend("auto" if args.backend == "all" else args.backend):
        write_golden(args.file, config, seed=args.seed)
    print(args.file)
    return 0


def _runs(name: str) -> bool:
    try:
        with registry.backend(name):
            return True
    except UserError:
        return False


def _table(columns: dict[str, list[Difference]], tolerance: float) -> str:
    rows = next(iter(columns.values()))
    width = max(len(row.name) for row in rows)
    lines = [f"{'tensor':<{width}}  {'shape':<14}  " + "  ".join(f"{name:>9}" for name in columns)]
    for place, row in enumerate(rows):
        errors = [column[place].error for column in columns.values()]
        mark = "  <-- too far off" if max(errors) > tolerance else ""
        shape = " x ".join(map(str, row.shape))
        lines.append(f"{row.name:<{width}}  {shape:<14}  " + "  ".join(f"{error:>9.1e}" for error in errors) + mark)
    return "\n".join(lines)
