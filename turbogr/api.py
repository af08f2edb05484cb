"""What the commands do, for a Python program, where no single function of a module is already that.

The rest of the Python API is re-exported by the package itself; see `turbogr/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turbogr.evaluate.evaluator import baseline_metrics, evaluate
from turbogr.recommend import open_run
from turbogr.train.selection import describe_checkpoint


@dataclass(frozen=True)
class RunEvaluation:
    """Metrics of a run on its held-out items: `metrics`, those of the `baselines` by name, and what was measured."""

    part: str
    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    num_users: int
    step: int
    protocol: str


def evaluate_run(
    run: str | Path,
    *,
    data: str | Path | None = None,
    which: Literal["best", "last"] = "best",
    part: Literal["test", "valid"] = "test",
) -> RunEvaluation:
    """Measure a trained run as `turbogr evaluate` does, without writing into its folder.

    `data` says where the store is now if it was moved.

    Raises:
        UserError: not a run, no checkpoint, no store, or a split that holds nothing out for this part.
    """
    opened = open_run(run, data=data, which=which)
    settings = opened.config.evaluate
    result = evaluate(
        opened.encoder,
        opened.store,
        opened.split,
        part,
        max_len=opened.max_len,
        ks=settings.ks,
        filter_seen=settings.filter_seen,
    )
    baselines = baseline_metrics(opened.store, opened.split, part, ks=settings.ks, filter_seen=settings.filter_seen)
    protocol = f"{result.protocol}; {describe_checkpoint(opened.config, opened.split, opened.info, part)}"
    return RunEvaluation(part, result.metrics, baselines, result.num_users, opened.info["step"], protocol)
