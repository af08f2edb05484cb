"""`turbogr evaluate`: measure a trained run on its held-out items, beside the baselines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from turbogr.errors import UserError
from turbogr.evaluate.metrics import REPEATED
from turbogr.files import check_target, replace_text

if TYPE_CHECKING:
    from turbogr.evaluate.evaluator import Evaluation
    from turbogr.parallel.world import World
    from turbogr.recommend import TrainedRun


def add_parser(subparsers: Any) -> None:
    """Add `evaluate` to the command line."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure a trained run on its held-out items",
        description="Rank every user's held-out item against the whole catalogue and compare with the baselines. "
        "Writes RUN/evaluation.json and RUN/samples.json. The numbers depend neither on the batch size nor on the "
        "number of ranks.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="run folder, as written by `turbogr train`")
    parser.add_argument("--data", metavar="DIR", type=Path, help="the store of the run, if it was moved")
    parser.add_argument("--which", choices=["best", "last"], default="best", help="checkpoint (default: %(default)s)")
    parser.add_argument(
        "--part", choices=["test", "valid"], default="test", help="held-out part (default: %(default)s)"
    )
    parser.add_argument("--batch-size", metavar="N", type=int, help="users that share one pass over the catalogue")
    parser.add_argument(
        "--filter-last",
        metavar="N",
        type=int,
        help="let only the last N earlier items of a user be no candidates, as some public code does, not all; prints, "
        "and writes to --json alone",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result of evaluation.json there too")
    parser.add_argument("--ranks", metavar="N", type=int, help="share the users among N processes on this machine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.ranks is not None:
        from turbogr.parallel.launch import check_ranks, launch

        check_ranks(args.ranks)
        if args.ranks > 1:
            return launch(_command(args), args.ranks)
    from turbogr.parallel.world import joined

    with joined() as world, world.telling_once():
        _evaluate(args, world)
    return 0


def _command(args: argparse.Namespace) -> list[str]:
    """The arguments of turbogr that do the same without --ranks."""
    command = ["evaluate", str(args.folder), "--which", args.which, "--part", args.part]
    optional = {"--data": args.data, "--batch-size": args.batch_size, "--json": args.json}
    optional["--filter-last"] = args.filter_last
    return command + [str(part) for name, value in optional.items() if value is not None for part in (name, value)]


def _evaluate(args: argparse.Namespace, world: World) -> None:
    """Measure on all ranks; write and print on rank 0."""
    from turbogr.evaluate.evaluator import evaluate
    from turbogr.evaluate.heldout import HeldOut
    from turbogr.recommend import open_run
    from turbogr.train.selection import describe_checkpoint

    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch-size is {args.batch_size}; give at least 1")
    if args.filter_last is not None and args.filter_last < 1:
        raise UserError(f"--filter-last is {args.filter_last}; give at least 1")
    if args.json is not None:
        check_target(args.json, "--json")
    opened = world.together(lambda: open_run(args.folder, data=args.data, which=args.which))
    if args.filter_last is None:
        for name in ("evaluation.json", "samples.json"):
            check_target(args.folder / name, "the result")
    settings = opened.config.evaluate
    if args.filter_last is not None and not settings.filter_seen:
        raise UserError("--filter-last makes no sense for a run with evaluate.filter_seen=false; leave it out")
    num_users = len(HeldOut.of(opened.store, opened.split, args.part))
    total = -(-num_users // world.size)  # of this rank, about
    disable = None if world.is_first else True
    with tqdm(total=total, desc="evaluating", unit="user", delay=2, leave=False, disable=disable) as bar:
        result = evaluate(
            opened.encoder,
            opened.store,
            opened.split,
            args.part,
            max_len=opened.max_len,
            ks=settings.ks,
            filter_seen=settings.filter_seen,
            filter_last=args.filter_last,
            batch_size=args.batch_size,
            progress=bar.update,
            world=world,
        )
    if not world.is_first:
        return
    baselines = _baselines(opened, args.part, args.filter_last)
    measured = {"model": result.metrics, **baselines}
    protocol = f"{result.protocol}; {describe_checkpoint(opened.config, opened.split, opened.info, args.part)}"
    written = _write(args, opened, result, measured, protocol)
    print(_table(opened.config.model.name, measured))
    print(f"\n{result.num_users:,} users. {protocol}.")
    for reason, number in result.skipped.items():
        print(f"{number:,} users are not part of it: {reason}.")
    if written is not None:
        print(f"Written to {written}", file=sys.stderr)


def _write(
    args: argparse.Namespace,
    opened: TrainedRun,
    result: Evaluation,
    measured: dict[str, dict[str, float]],
    protocol: str,
) -> Path | None:
    """Write evaluation.json and samples.json; what was measured with another filter than the run's goes to --json."""
    from turbogr.evaluate.evaluator import write_evaluation
    from turbogr.evaluate.samples import sample_users, write_samples
    from turbogr.train.selection import selected_on

    standard = args.filter_last is None
    target: Path | None = args.folder / "evaluation.json" if standard else args.json
    if target is None:
        return None
    # One sentence heads the file: that of the test part, if it has been measured.
    earlier = _earlier_evaluation(target, opened.info["step"]) if standard else {}
    head: dict[str, Any] = {"num_users": result.num_users, "protocol": protocol, "skipped": result.skipped}
    if args.part == "valid" and "test" in earlier.get("parts", {}):
        head = {key: earlier[key] for key in head}
    write_evaluation(
        target,
        {**earlier.get("parts", {}), args.part: measured},
        step=opened.info["step"],
        epoch=opened.info["epoch"],
        selected_on=selected_on(opened.config, opened.split, opened.info),
        **head,
    )
    if not standard:
        return target
    if args.json is not None:
        replace_text(args.json, target.read_text(encoding="utf-8"))
    samples = sample_users(
        opened.encoder,
        opened.store,
        opened.split,
        args.part,
        max_len=opened.max_len,
        filter_seen=opened.config.evaluate.filter_seen,
    )
    write_samples(args.folder / "samples.json", samples)
    return target


def _baselines(opened: TrainedRun, part: str, filter_last: int | None) -> dict[str, dict[str, float]]:
    from turbogr.evaluate.evaluator import baseline_metrics

    settings = opened.config.evaluate
    with tqdm(desc="measuring the baselines", bar_format="{desc} {elapsed}", delay=2, leave=False, disable=None) as bar:

        def show_life() -> bool:
            bar.update()
            return False

        return baseline_metrics(
            opened.store,
            opened.split,
            part,
            ks=settings.ks,
            filter_seen=settings.filter_seen,
            filter_last=filter_last,
            should_stop=show_life,
        )


def _table(model: str, measured: dict[str, dict[str, float]]) -> str:
    """Return the metrics as lines of text, one column per system."""
    names = {"model": model}
    heads = [names.get(system, system) for system in measured]
    lines = [" " * 8 + "".join(f"{head:>12}" for head in heads)]
    for metric in measured["model"]:
        lines.append(f"{metric:<8}" + "".join(f"{values[metric]:>12.4f}" for values in measured.values()))
    return "\n".join(lines)


def _earlier_evaluation(path: Path, step: int) -> dict[str, Any]:
    """Return an earlier evaluation of the same checkpoint by the same rule, whose other part is kept; {} for none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        same = (record["step"], record["repeated"]) == (step, REPEATED)
        complete = {"parts", "num_users", "protocol", "skipped"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none, or a damaged one, which is replaced now
    return dict(record) if same and complete else {}
