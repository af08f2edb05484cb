"""Functions of the Python API that do the work of a command and are in no other module.

The other functions are re-exported by the package itself; see `turbogr/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from turbogr.evaluation.user_positions import Measured
from turbogr.runs import Which, open_run
from turbogr.training.checkpoint_selection import describe_checkpoint


@dataclass(frozen=True)
class RunEvaluation:
    """Metrics of a run on its held-out items: `metrics`, those of the `baselines` by name, and what was measured.

    `standard_errors` and `baseline_standard_errors` have the same form; 1.96 of them to both sides are a 95 %
    confidence interval.
    """

    part: str
    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    num_users: int
    step: int
    protocol: str
    standard_errors: dict[str, float] = field(default_factory=dict)
    baseline_standard_errors: dict[str, dict[str, float]] = field(default_factory=dict)


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    which: Which = "best",
    part: Literal["test", "valid"] = "test",
    plugins: Sequence[str | Path] = (),
) -> RunEvaluation:
    """Measure a trained run as `turbogr evaluate` does, without writing into its folder.

    `data` is where the store is now if it was moved. `plugins` are files or modules of your own that the run needs.

    Raises:
        UserError: not a run, no checkpoint, no store, or a split that holds nothing out for this part.
    """
    opened = open_run(run, data=data, which=which, plugins=plugins)
    result = opened.task.evaluate(opened.tables, opened.store, opened.split, part)
    baselines = opened.task.measure_baselines(opened.store, opened.split, part)
    protocol = f"{result.protocol}; {describe_checkpoint(opened.config, opened.split, opened.checkpoint, part)}"
    return RunEvaluation(
        part,
        result.metrics,
        {name: system.metrics for name, system in baselines.items()},
        result.num_users,
        opened.checkpoint.step,
        protocol,
        Measured.of(result).standard_errors,
        {name: system.standard_errors for name, system in baselines.items()},
    )
