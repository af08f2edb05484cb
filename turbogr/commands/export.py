"""`turbogr export`: write a trained run as a folder that works without TurboGR."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from turbogr.commands._plugins_option import add_plugins_option
from turbogr.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add `export` to the command line."""
    parser = subparsers.add_parser(
        "export",
        help="write a trained run as a folder that works without TurboGR",
        description="Write what a run recommends with as one folder: item vectors, the user model as ONNX and "
        "torch.export, an index, model.json, and check.py, which compares its lists with those of `turbogr recommend` "
        "and needs onnxruntime, numpy, safetensors and pyarrow alone. A folder at --out is replaced as a whole.",
    )
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="run folder, as written by `turbogr train`; with --apply a delta"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write")
    parser.add_argument("--data", metavar="DIR", type=Path, help="the store of the run, if it was moved")
    parser.add_argument("--which", choices=["best", "last"], default="best", help="checkpoint (default: %(default)s)")
    parser.add_argument(
        "--format",
        choices=["folder", "weights"],
        default="folder",
        help="weights: the parameters and tables alone, as safetensors (default: %(default)s)",
    )
    parser.add_argument(
        "--since", metavar="OLD", type=Path, help="an earlier export: write only what changed since, as a delta folder"
    )
    parser.add_argument(
        "--apply", action="store_true", help="RUN is a delta folder: make the full export of it and --since OLD"
    )
    parser.add_argument(
        "--index",
        choices=["auto", "hnsw", "none"],
        default="auto",
        help="an index for fast search in large catalogues; auto: where faiss is installed (default: %(default)s)",
    )
    parser.add_argument(
        "--with-users", action="store_true", help="add the users and their histories, to be asked for by their ids"
    )
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.apply:
        if args.since is None:
            raise UserError("--apply needs the export that the delta was made from: --since OLD")
        from turbogr.exports.delta_folder import apply_to

        print(describe(args.out, apply_to(args.since, args.folder, args.out)))
        return 0
    if args.format == "weights":
        from turbogr.exports.weights import export_weights

        if args.since is not None:
            raise UserError("--since compares exports, not weights; leave out --since or --format=weights")
        print(export_weights(args.folder, args.out, which=args.which, plugins=args.plugins))
        return 0
    from turbogr.exports.folder_writer import export

    made = export(
        args.folder,
        args.out,
        data=args.data,
        which=args.which,
        index={"auto": None, "hnsw": True, "none": False}[args.index],
        with_users=args.with_users,
        since=args.since,
        plugins=args.plugins,
    )
    for note in made.notes:
        print(note, file=sys.stderr)
    print(describe(made.folder, made.facts) if args.since is None else describe_delta(made.folder, made.facts))
    return 0


def describe(folder: Path, facts: dict[str, Any]) -> str:
    """Return what an export is, in lines."""
    size = sum(file["bytes"] for file in facts["files"].values())
    lines = [f"{folder}: {facts['delivered']['label']}, {facts['items']['num']:,} items, {size / 1e6:,.1f} MB"]
    index = facts["index"]
    if "file" in index:
        lines.append(f"  index: recall@10 {index['recall@10']:.4f} with a breadth of {index['ef_search']}")
    lines.append(f"  version {facts['version'][:12]}; its own check passed: python {folder / 'check.py'} repeats it")
    return "\n".join(lines)


def describe_delta(folder: Path, facts: dict[str, Any]) -> str:
    """Return what a delta is, in lines."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    changed = sum(file["how"] != "same" for file in facts["files"].values())
    return (
        f"{folder}: {changed} of {len(facts['files'])} files changed, {size / 1e6:,.1f} MB, from version "
        f"{facts['base'][:12]} to {facts['version'][:12]}; `turbogr export {folder} --apply --since OLD --out NEW` or "
        f"`python {folder / 'apply.py'} OLD NEW` makes the full export"
    )
