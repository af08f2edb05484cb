"""Train the same recipe with different objectives and seeds, and tabulate what each reaches.

    python tools/compare_negatives.py recipes/ml-1m/hstu.yaml --data data/ml-1m --out runs/negatives-ml-1m

A run that is finished is kept, one that was interrupted continues, so the command can be stopped and started again.
Each row is the mean and the standard deviation over the seeds of the test metrics of the best checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from turbogr.errors import UserError
from turbogr.train.run import train

OBJECTIVES: dict[str, list[str]] = {
    "128": ["loss.num_negatives=128"],
    "128 fp16": ["loss.num_negatives=128", "loss.precision=fp16"],
    "128 int8": ["loss.num_negatives=128", "loss.precision=int8"],
    "64 shared to 128": ["loss.num_negatives=64", "loss.expansion=2"],
    "64 shared to 256": ["loss.num_negatives=64", "loss.expansion=4"],
    "64": ["loss.num_negatives=64"],
    "64 shared to 128 by position": ["loss.num_negatives=64", "loss.expansion=2", "loss.sharing=positions"],
    "64 shared to 128 as logits": ["loss.num_negatives=64", "loss.expansion=2", "loss.sharing=logits"],
}


def main(arguments: Sequence[str]) -> int:
    """Train what is not trained yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path, help="a folder for the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(OBJECTIVES), default=list(OBJECTIVES), metavar="NAME")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--table", action="store_true", help="train nothing, tabulate what is there")
    options = parser.parse_args(arguments)
    try:
        for seed in range(0 if options.table else options.seeds):
            for name in options.only:
                run = run_folder(options.out, name, seed)
                if (run / "summary.json").exists():
                    continue
                overrides = [*options.set, *OBJECTIVES[name], f"train.seed={seed}"]
                result = train(options.recipe, options.data, run, overrides=overrides, resume=True)
                if result.status == "interrupted":
                    return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(options.out, options.only, options.seeds))
    return 0


def run_folder(out: Path, name: str, seed: int) -> Path:
    """Where the run of an objective and a seed lies."""
    return out / f"{name.replace(' ', '-')}-{seed}"


def table(out: Path, names: Sequence[str], seeds: int) -> str:
    """Markdown with a row per objective that has finished runs."""
    lines: list[str] = []
    for name in names:
        summaries = [run_folder(out, name, seed) / "summary.json" for seed in range(seeds)]
        found = [json.loads(path.read_text())["metrics"] for path in summaries if path.exists()]
        if not found:
            continue
        if not lines:
            lines = [f"| negatives | runs | {' | '.join(found[0])} |", "|---|---|" + "---|" * len(found[0])]
        cells = [_mean_and_deviation([metrics[key] for metrics in found]) for key in found[0]]
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines) or f"no finished runs in {out}"


def _mean_and_deviation(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
