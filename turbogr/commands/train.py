"""`turbogr train`: train a recipe on a prepared store and write a run folder."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from turbogr.commands._plugins_option import add_plugins_option, plugins_arguments


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a recipe on a prepared store",
        description="Train a recipe on a prepared store. Ctrl-C or SIGTERM writes a checkpoint and ends; --resume "
        "continues from there and ends with the same weights as an uninterrupted run.",
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="name of a recipe, such as quickstart (`turbogr recipes` lists them), or a YAML file",
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="store written by `turbogr prepare`")
    parser.add_argument("--out", required=True, metavar="RUN", help="run folder to write")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change one value of the recipe, e.g. --set train.epochs=5; may be repeated",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in RUN from its newest checkpoint")
    parser.add_argument(
        "--until-epoch",
        type=int,
        metavar="N",
        help="pause after epoch N with a checkpoint; --resume goes on to the same weights as without the pause",
    )
    parser.add_argument(
        "--init-from",
        metavar="RUN",
        help="start from the parameters and item vectors of another run; --data must extend that run's data",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="train with N processes on this machine; on several machines start the command with torchrun instead",
    )
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.ranks is not None:
        from turbogr.parallel.launch import check_ranks, launch

        check_ranks(args.ranks)
        if args.ranks > 1:
            until = [] if args.until_epoch is None else ["--until-epoch", str(args.until_epoch)]
            return launch(_command(args) + until + (["--resume"] if args.resume else []), args.ranks)
    from turbogr.parallel.world import is_first_rank
    from turbogr.training.run import train

    result = train(
        args.recipe,
        args.data,
        args.out,
        overrides=args.overrides,
        resume=args.resume,
        init_from=args.init_from,
        plugins=args.plugins,
        until_epoch=args.until_epoch,
    )
    if not is_first_rank():
        return 0
    if result.status == "interrupted":
        from turbogr.parallel.launch import launched_ranks

        ranks = launched_ranks()
        _say_what_was_skipped(result.skipped_steps)
        again = [*_command(args), "--resume", *([] if ranks is None else ["--ranks", str(ranks)])]
        command = shlex.join(["turbogr", *again])
        saved = f"step {result.step} is saved" if result.step else "nothing is lost but time"
        how = "paused" if result.signal is None else "interrupted"
        print(f"{how}; {saved}. Continue with: {command}", file=sys.stderr)
        return 0 if result.signal is None else 128 + result.signal
    best = "" if result.best_value is None else f"; best {result.best_value:.4f} at step {result.best_step}"
    for line in _delivery(args.out):
        print(line)
    _say_what_was_skipped(result.skipped_steps)
    how = f"{result.status} after {result.step} steps{best}" if result.step else "fitted"
    print(f"{how}. Next: turbogr evaluate {shlex.quote(args.out)}")
    return 0


def _say_what_was_skipped(steps: Sequence[int]) -> None:
    if steps:
        from turbogr.training.bad_steps import describe_skipped

        print(describe_skipped(steps), file=sys.stderr)


def _delivery(run: str) -> list[str]:
    """Return the lines about what the finished run delivers."""
    from pathlib import Path

    from turbogr.runs import RunFolder
    from turbogr.simple.delivery import Delivered
    from turbogr.simple.delivery_text import delivery_lines
    from turbogr.training.run_summary import read_summary

    summary = read_summary(Path(run)) or {}
    label = str(RunFolder.open(run).record["model"]["name"])
    return delivery_lines(Delivered.read(Path(run), label), label, summary.get("baselines_refused", {}))


def _command(args: argparse.Namespace) -> list[str]:
    """Return the arguments of turbogr that start this run, without --resume and --ranks."""

    command = ["train", args.recipe, "--data", args.data, "--out", args.out]
    command += [part for override in args.overrides for part in ("--set", override)]
    command += plugins_arguments(args)
    command += [] if args.init_from is None else ["--init-from", args.init_from]
    return command
