"""`turbogr evaluate`: measure a trained run on its held-out items, beside the baselines."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from turbogr.commands._device_option import add_device_option
from turbogr.commands._plugins_option import add_plugins_option, plugins_arguments
from turbogr.errors import UserError
from turbogr.files import check_writable, replace_text

if TYPE_CHECKING:
    from turbogr.evaluation.metric_info import Coverage, MetricInfo
    from turbogr.evaluation.progress_lines import ProgressLines
    from turbogr.evaluation.user_positions import Measured
    from turbogr.parallel.world import World
    from turbogr.runs import OpenedRun
    from turbogr.tasks.task import Measurement


def add_parser(subparsers: Any) -> None:
    """Add `evaluate` to the command line."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure a trained run on its held-out items",
        description="Measure a run on its held-out data and compare it with the baselines. Writes RUN/evaluation.json, "
        "and examples to RUN/samples.json and results by user to RUN/positions if the run's task has any. ± is a 95 % "
        "confidence interval of the mean over the users. The metrics depend neither on the batch size nor "
        "on the number of ranks.",
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
        help="filter only the last N earlier items of a user, as some public code does, not all of them; the result is "
        "printed, and written to --json only",
    )
    seen = parser.add_mutually_exclusive_group()
    for name, value, meaning in (("include", False, "with"), ("exclude", True, "without")):
        seen.add_argument(
            f"--{name}-seen",
            action="store_const",
            const=value,
            dest="filter_seen",
            help=f"rank {meaning} the items that the user has had before, whichever way the run was trained; a result "
            "of the other way is printed, and written to --json only",
        )
    parser.add_argument(
        "--users",
        metavar="N",
        type=int,
        help="measure a sample of N users, drawn by their ids with evaluate.users_seed, the same for every method; an "
        "N of at least the number of users measures all of them. A result of another sample than the run's is printed, "
        "and written to --json only",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result to this file too")
    parser.add_argument("--ranks", metavar="N", type=int, help="share the users among N processes on this machine")
    add_device_option(parser)
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.ranks is not None:
        from turbogr.parallel.launch import check_ranks, launch

        check_ranks(args.ranks)
        if args.ranks > 1:
            return launch(_command(args), args.ranks)
    from turbogr.parallel.world import connected_world

    with connected_world() as world, world.reporting_errors_once():
        _evaluate(args, world)
    return 0


def _command(args: argparse.Namespace) -> list[str]:
    """The arguments of turbogr that do the same without --ranks."""
    command = ["evaluate", str(args.folder), "--which", args.which, "--part", args.part, "--device", args.device]
    optional = {"--data": args.data, "--batch-size": args.batch_size, "--json": args.json}
    optional |= {"--filter-last": args.filter_last, "--users": args.users}
    command += plugins_arguments(args)
    if args.filter_seen is not None:
        command.append("--exclude-seen" if args.filter_seen else "--include-seen")
    return command + [str(part) for name, value in optional.items() if value is not None for part in (name, value)]


def _evaluate(args: argparse.Namespace, world: World) -> None:
    """Measure on all ranks; write and print on rank 0."""
    from turbogr.accelerators import choose_device
    from turbogr.evaluation.baseline_titles import refusal_lines
    from turbogr.evaluation.user_positions import Measured
    from turbogr.parallel.consistency import use_same_kernels
    from turbogr.runs import open_run
    from turbogr.training.checkpoint_selection import describe_checkpoint

    for name, value in (
        ("--batch-size", args.batch_size),
        ("--filter-last", args.filter_last),
        ("--users", args.users),
    ):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; give at least 1")
    if args.json is not None:
        check_writable(args.json, "--json")
    device = choose_device(args.device, world.local_rank if world.size > 1 else None, "--device")
    opened = world.run_on_all(
        lambda: open_run(args.folder, data=args.data, which=args.which, plugins=args.plugins, device=device)
    )
    use_same_kernels(world, device)
    if _is_standard(args, opened):
        for name in ("evaluation.json", "samples.json"):
            check_writable(args.folder / name, "the result")
    result = _measure(args, opened, world)
    if not world.is_first:
        return
    baselines = _baselines(args, opened)
    better = opened.task.evaluate_delivered(
        opened.tables,
        opened.store,
        opened.split,
        args.part,
        should_stop=_lines("measuring what is delivered").watching(),
        **_options(args, "batch_size", "filter_last", "filter_seen", "users"),
    )
    delivered = {} if better is None else {"delivered": Measured.of(better)}
    measured = {**delivered, "model": Measured.of(result), **baselines}
    protocol = f"{result.protocol}; {describe_checkpoint(opened.config, opened.split, opened.checkpoint, args.part)}"
    if opened.config.train.precision != "fp32":
        protocol += f"; the model computes in {opened.config.train.precision}"
    coverage = None
    if _is_standard(args, opened):
        coverage = opened.task.coverage(opened.tables, opened.store, opened.split, args.part)
    written = _write(args, opened, result, measured, coverage, protocol)
    described = {info.name: info for info in opened.task.describe_metrics(result.metrics)}
    width = shutil.get_terminal_size().columns
    print(metric_table(opened.task.model_name(opened.config), measured, described, result.num_users, width))
    print(f"\n{result.num_users:,} users. {protocol}.")
    if delivered:
        print(f"Delivered is {opened.delivered}, chosen on the validation items: what `turbogr recommend` uses.")
    for line in refusal_lines(opened.task.refused_baselines(opened.store, opened.split)):
        print(line)
    if any(system.standard_errors for system in measured.values()):
        print("± is a 95 % confidence interval: how far the mean would vary with other users of the same kind.")
    if coverage is not None:
        print(
            f"Coverage: {coverage.num_shown:,} of {coverage.num_items:,} items ({coverage.share:.1%}) are among the "
            f"best {coverage.k} of at least one of {coverage.num_users:,} users."
        )
    for reason, number in result.skipped.items():
        print(f"{number:,} users are not part of it: {reason}.")
    if written is not None:
        print(f"Written to {written}", file=sys.stderr)


def _measure(args: argparse.Namespace, opened: OpenedRun, world: World) -> Measurement:
    given = _options(args, "batch_size", "filter_last", "filter_seen", "users")
    if given:
        _check_options(opened, given)
    total = opened.task.num_measured(opened.split, args.part, world.size, args.users)
    disable = None if world.is_first else True
    lines = _lines("evaluating", total, shown=world.is_first)
    with tqdm(total=total, desc="evaluating", unit="user", delay=2, leave=False, disable=disable) as bar:

        def advance(num_users: int) -> None:
            bar.update(num_users)
            lines.advance(num_users)

        return opened.task.evaluate(
            opened.tables,
            opened.store,
            opened.split,
            args.part,
            progress=advance,
            should_stop=lines.watching(),
            world=world,
            **given,
        )


def _lines(title: str, total: int | None = None, *, shown: bool = True) -> ProgressLines:
    """Progress where stderr is no terminal, which has a bar."""
    from turbogr.evaluation.progress_lines import ProgressLines

    return ProgressLines(title, total, shown=shown and not sys.stderr.isatty())


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given, as arguments of the task."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _is_standard(args: argparse.Namespace, opened: OpenedRun) -> bool:
    """Whether the run is measured by its own protocol, so that the result belongs into its folder."""
    config = opened.config.evaluate
    own = args.filter_seen in (None, config.filter_seen) and args.users in (None, config.users)
    return args.filter_last is None and own


def _check_options(opened: OpenedRun, given: Mapping[str, Any]) -> None:
    """Raise UserError for options that the run's task does not have, or that contradict each other."""
    from turbogr.tasks.retrieval import RetrievalTask

    name = next(iter(given))
    if not isinstance(opened.task, RetrievalTask):
        shown = {"filter_seen": "--include-seen and --exclude-seen are"}.get(name, f"--{name.replace('_', '-')} is")
        raise UserError(f"{shown} for runs of the task 'retrieval', and this is one of '{opened.task.name}'; omit it")
    if "filter_last" in given and not given.get("filter_seen", opened.config.evaluate.filter_seen):
        cause = "--include-seen" if "filter_seen" in given else "a run with evaluate.filter_seen=false"
        raise UserError(f"--filter-last makes no sense for {cause}; leave it out, or add --exclude-seen")


def _baselines(args: argparse.Namespace, opened: OpenedRun) -> dict[str, Measured]:
    given = _options(args, "filter_last", "filter_seen", "users")
    with tqdm(desc="measuring the baselines", bar_format="{desc} {elapsed}", delay=2, leave=False, disable=None) as bar:

        def update_bar() -> bool:
            bar.update()
            return False

        should_stop = _lines("measuring the baselines").watching(update_bar)
        return opened.task.measure_baselines(opened.store, opened.split, args.part, should_stop=should_stop, **given)


def _write(
    args: argparse.Namespace,
    opened: OpenedRun,
    result: Measurement,
    measured: dict[str, Measured],
    coverage: Coverage | None,
    protocol: str,
) -> Path | None:
    """Write evaluation.json, samples.json and positions by user; by another protocol than the run's, only --json."""
    from turbogr.evaluation.evaluator import write_evaluation
    from turbogr.evaluation.sample_users import write_samples
    from turbogr.evaluation.user_positions import UserPositions
    from turbogr.training.checkpoint_selection import selected_on

    standard = _is_standard(args, opened)
    target: Path | None = args.folder / "evaluation.json" if standard else args.json
    if target is None:
        return None
    # The file has one protocol: that of the test part, if it has been measured.
    earlier = _earlier_evaluation(target, opened) if standard else {}
    head: dict[str, Any] = {"num_users": result.num_users, "protocol": protocol, "skipped": dict(result.skipped)}
    if args.part == "valid" and "test" in earlier.get("parts", {}):
        head = {key: earlier[key] for key in head}
    config = opened.config.evaluate
    rule = opened.task.rule(config if args.users is None else dataclasses.replace(config, users=args.users))
    metrics = {name: system.metrics for name, system in measured.items()}
    errors = {name: system.standard_errors for name, system in measured.items() if system.standard_errors}
    details = {name: system.details for name, system in measured.items() if system.details}
    covered = {} if coverage is None else {args.part: dataclasses.asdict(coverage)}
    write_evaluation(
        target,
        {**earlier.get("parts", {}), args.part: metrics},
        standard_errors={**earlier.get("standard_errors", {}), args.part: errors},
        coverage={**earlier.get("coverage", {}), **covered},
        step=opened.checkpoint.step,
        epoch=opened.checkpoint.epoch,
        selected_on=selected_on(opened.config, opened.split, opened.checkpoint),
        rule=rule if standard else {**rule, **_options(args, "filter_last", "filter_seen")},
        both_ways={
            name: {**earlier.get(name, {}), args.part: systems} for name, systems in _both_ways(measured).items()
        },
        details={**earlier.get("details", {}), **({args.part: details} if details else {})},
        **head,
    )
    if not standard:
        return target
    if args.json is not None:
        replace_text(args.json, target.read_text(encoding="utf-8"), follow_link=True)
    samples = opened.task.samples(opened.tables, opened.store, opened.split, args.part)
    if samples is not None:
        write_samples(args.folder / "samples.json", {"step": opened.checkpoint.step, **samples})
    sample = opened.task.sample()
    by_user = UserPositions.of(opened.store, opened.split, args.part, opened.checkpoint.step, measured, sample)
    if by_user is not None:
        by_user.write(args.folder)
    return target


def _both_ways(measured: Mapping[str, Measured]) -> dict[str, dict[str, dict[str, float]]]:
    """The metrics of all systems without and with seen items, by their names in evaluation.json."""
    exclude = {name: system.metrics_exclude_seen for name, system in measured.items()}
    include = {name: system.metrics_include_seen for name, system in measured.items()}
    found = {"parts_exclude_seen": exclude, "parts_include_seen": include}
    kept = {key: {n: m for n, m in systems.items() if m is not None} for key, systems in found.items()}
    return {key: systems for key, systems in kept.items() if systems}


def metric_table(
    model: str, measured: Mapping[str, Measured], described: Mapping[str, MetricInfo], num_users: int, width: int
) -> str:
    """Return the metrics as lines of text, one column per system; systems that do not fit follow below.

    ± is the margin of a 95 % confidence interval, for metrics that have a standard error.
    """
    names = list(measured["model"].metrics)
    first = max(8, *(len(name) for name in names))
    columns = {system: _cells(found, names, num_users) for system, found in measured.items()}
    heads = {system: model if system == "model" else system for system in measured}
    room = 2 + max(8, *(len(text) for texts in columns.values() for text in texts), *map(len, heads.values()))
    notes = ["" if described[name].higher_is_better else "  lower is better" for name in names]
    at_once = max(1, (width - first) // room)
    blocks = []
    for begin in range(0, len(columns), at_once):
        shown = list(columns)[begin : begin + at_once]
        lines = [" " * first + "".join(f"{heads[system]:>{room}}" for system in shown)]
        for place, name in enumerate(names):
            lines.append(f"{name:<{first}}" + "".join(f"{columns[s][place]:>{room}}" for s in shown) + notes[place])
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cells(measured: Measured, names: list[str], num_users: int) -> list[str]:
    from turbogr.evaluation.metrics import margin

    texts = []
    for name in names:
        value, error = measured.metrics.get(name), measured.standard_errors.get(name)
        text = "-" if value is None else f"{value:.4f}"
        texts.append(text if error is None else f"{text} ± {margin(error, num_users):.4f}")
    return texts


def _earlier_evaluation(path: Path, opened: OpenedRun) -> dict[str, Any]:
    """Return an earlier evaluation of the same checkpoint by the same rule, whose other part is kept; {} for none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rule = record.get("rule", record)  # 0.1.0 wrote the rule at top level
        rule_now = opened.task.rule(opened.config.evaluate)
        same = record["step"] == opened.checkpoint.step and opened.task.is_comparable(rule)
        same = same and rule.get("filter_seen", True) == rule_now.get("filter_seen", True)
        complete = {"parts", "num_users", "protocol", "skipped"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # none, or a damaged one, which is replaced now
    return dict(record) if same and complete else {}
