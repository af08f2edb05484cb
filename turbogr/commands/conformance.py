"""`turbogr conformance`: compare our models with a golden file, or write one for others to compare with."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from turbogr.accelerators import choose_device
from turbogr.config import MAX_TIME_BUCKETS, ModelConfig
from turbogr.errors import UserError
from turbogr.files import check_writable
from turbogr.models.golden import TOLERANCE, Difference, write_golden
from turbogr.models.golden_files import read_golden
from turbogr.ops import registry, triton_runtime
from turbogr.plugins import built_in_names, find

_SIZES = {
    "dim": (32, 1, 2**14, "width of the model"),
    "num-blocks": (2, 1, 2**10, "number of blocks"),
    "num-heads": (2, 1, 2**10, "heads per block"),
    "max-len": (25, 2, 2**16, "longest sequence, and N of the 1/N normaliser"),
    "num-time-buckets": (128, 1, MAX_TIME_BUCKETS, "time buckets besides the first"),
}
"""Sizes of a file to write: default, smallest and largest value, and meaning."""

_FFN_MULTIPLIER = 2.0
_LARGEST_FFN_MULTIPLIER = 16

_READING = ("backend", "tolerance", "device")
_WRITING = ("model", "overwrite", *_SIZES, "ffn-multiplier", "seed")


def add_parser(subparsers: Any) -> None:
    """Add `conformance` to the command line."""
    parser = subparsers.add_parser(
        "conformance",
        help="compare a model with a golden file, or write one",
        description="Run our model on the parameters and input of a golden file and compare the output and every "
        "gradient; exit status 1 if one differs by more than the tolerance. With --write, write such a file from our "
        "model, so that other implementations can be compared with it. docs/models/conformance.md has the layout.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.npz", help="golden file to read, or to write with --write")
    parser.add_argument(
        "--backend",
        choices=["all", *registry.choices()],
        help="which backend runs the operators; 'all' compares every backend that runs on this machine and says why "
        "others do not (default: auto)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where to compute: cpu, cuda, npu, mps, or auto, the accelerator (default: cpu)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help=f"largest error (default: relative, {TOLERANCE:g}; of ranking and masks see docs/models/conformance.md)",
    )
    writing = parser.add_argument_group("writing")
    writing.add_argument("--write", action="store_true", help="write FILE.npz instead of reading it")
    writing.add_argument("--model", choices=built_in_names("block"), help="which model (default: hstu)")
    writing.add_argument("--overwrite", action="store_true", default=None, help="replace a file that exists")
    for name, (default, _, _, meaning) in _SIZES.items():
        writing.add_argument(f"--{name}", type=int, help=f"{meaning} (default: {default})")
    writing.add_argument(
        "--ffn-multiplier",
        type=float,
        help=f"width of the feed-forward part in model widths (default: {_FFN_MULTIPLIER:g})",
    )
    writing.add_argument("--seed", type=int, help="of the random parameters and input (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.write:
        _refuse(args, _READING, "is for comparing and has no effect with --write; leave it out")
        return _write(args)
    _refuse(args, _WRITING, "is for writing and has no effect without --write; leave it out, or pass --write")
    return _compare(args)


def _compare(args: argparse.Namespace) -> int:
    tolerance: float | None = args.tolerance
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise UserError(f"--tolerance is {tolerance:g}; give a number of 0 or more, such as {TOLERANCE:g}")
    golden, device = read_golden(args.file), choose_device(args.device or "cpu", setting="--device")
    left_out = {name: _why_not(name, device) for name in registry.choices()} if args.backend == "all" else {}
    names = [name for name, reason in left_out.items() if reason is None] or [args.backend or "auto"]
    columns: dict[str, list[Difference]] = {}
    for name in names:
        with registry.backend(name):
            columns[name] = golden.compare(device=device)
    print(_table(columns, tolerance))
    for name, reason in left_out.items():
        if reason is not None:
            print(f"{name} is left out: {reason}")

    rows = [row for column in columns.values() for row in column]
    over = [row for row in rows if row.error > _allowed(row, tolerance)]
    worst = max(over or rows, key=lambda row: row.error / (_allowed(row, tolerance) or math.inf))
    found = f"the largest error is {worst.error:.1e}"
    if over:
        print(f"{golden.title}: NOT the same; {found}, above {_allowed(worst, tolerance):g}")
        return 1
    print(f"{golden.title}: the same; {found}, at most {_allowed(worst, tolerance):g} is allowed")
    return 0


def _allowed(row: Difference, tolerance: float | None) -> float:
    """Return the largest error of a tensor that counts as the same; `tolerance` is the user's."""
    return tolerance if tolerance is not None else TOLERANCE if row.tolerance is None else row.tolerance


def _write(args: argparse.Namespace) -> int:
    model = args.model or "hstu"
    for size, part in find("block", model).factory.unused_sizes.items():
        _refuse(args, (size.replace("_", "-"),), f"has no effect for {model}, which has no {part}; leave it out")
    sizes: dict[str, Any] = {}
    for name, (default, least, largest, _) in _SIZES.items():
        given = _given(args, name)
        size = sizes[name.replace("-", "_")] = default if given is None else given
        if not least <= size <= largest:
            raise UserError(f"--{name} is {size}; give a whole number from {least} to {largest:,}")
    multiplier = _FFN_MULTIPLIER if args.ffn_multiplier is None else args.ffn_multiplier
    if not 0 < multiplier <= _LARGEST_FFN_MULTIPLIER:
        raise UserError(f"--ffn-multiplier is {multiplier:g}; give a number above 0, at most {_LARGEST_FFN_MULTIPLIER}")
    seed = 0 if args.seed is None else args.seed
    if seed < 0:
        raise UserError(f"--seed is {seed}; give a whole number of 0 or more")
    check_writable(args.file, "the golden file")
    if os.path.lexists(args.file) and not args.overwrite:
        raise UserError(f"{args.file} already exists; name another file or pass --overwrite")
    config = ModelConfig(name=model, ffn_multiplier=multiplier, dropout=0.0, **sizes)
    config.check()
    write_golden(args.file, config, seed=seed)
    print(args.file)
    return 0


def _refuse(args: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    for name in names:
        if _given(args, name) is not None:
            raise UserError(f"--{name} {reason}")


def _given(args: argparse.Namespace, name: str) -> Any:
    """Return the value of an option, None if it was not given."""
    return getattr(args, name.replace("-", "_"))


def _why_not(backend: str, device: torch.device) -> str | None:
    """Return why a backend does not run on this machine's device, None if it does."""
    try:
        with registry.backend(backend):
            pass
    except UserError as error:
        return str(error)
    return triton_runtime.NOT_INTERPRETING if backend == "triton" and not _runs_triton(device) else None


def _runs_triton(device: torch.device) -> bool:
    return device.type != "cpu" or triton_runtime.is_interpreting()


def _table(columns: dict[str, list[Difference]], tolerance: float | None) -> str:
    rows = next(iter(columns.values()))
    width = max(len(row.name) for row in rows)
    lines = [f"{'tensor':<{width}}  {'shape':<14}  " + "  ".join(f"{name:>9}" for name in columns)]
    for number, row in enumerate(rows):
        errors = [column[number].error for column in columns.values()]
        mark = "  <-- above tolerance" if max(errors) > _allowed(row, tolerance) else ""
        shape = " x ".join(map(str, row.shape))
        lines.append(f"{row.name:<{width}}  {shape:<14}  " + "  ".join(f"{error:>9.1e}" for error in errors) + mark)
    return "\n".join(lines)
