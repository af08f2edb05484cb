"""Functions of the Python API that do the work of a command and are in no other module.

The other functions are re-exported by the package itself; see `turbogr/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turbogr.errors import UserError
from turbogr.evaluation.user_positions import Measured
from turbogr.runs import Which, open_run
from turbogr.tasks.retrieval import RetrievalTask
from turbogr.training.checkpoint_selection import describe_checkpoint


@dataclass(frozen=True)
class RunEvaluation:
    """Metrics of a run on its held-out items: `metrics`, those of the `baselines` by name, and what was measured.

    `metrics` are those of what the run recommends with, which `delivered` names; `model_metrics` are the model's own.
    `standard_errors` and `baseline_standard_errors` have the same form; 1.96 of them to both sides are a 95 %
    confidence interval. `metrics_exclude_seen` and `metrics_include_seen` are those without and with the users' earlier
    items among the candidates; `metrics` is one of the two. They are None for tasks that do not recommend items.
    """

    part: str
    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    num_users: int
    step: int
    protocol: str
    standard_errors: dict[str, float] = field(default_factory=dict)
    baseline_standard_errors: dict[str, dict[str, float]] = field(default_factory=dict)
    metrics_exclude_seen: dict[str, float] | None = None
    metrics_include_seen: dict[str, float] | None = None
    delivered: str | None = None
    model_metrics: dict[str, float] = field(default_factory=dict)


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    which: Which = "best",
    part: Literal["test", "valid"] = "test",
    filter_seen: bool | None = None,
    users: int | None = None,
    plugins: Sequence[str | Path] = (),
    device: str = "auto",
) -> RunEvaluation:
    """Measure a trained run as `turbogr evaluate` does, without writing into its folder.

    `data` is where the store is now if it was moved. `filter_seen` says whether items that a user has had before are
    left out of the candidates; None: as the run was trained. `users` measures a sample
    of so many users, as `evaluate.users` does. `plugins` are files or modules of your own that the run
    needs. `device` is where the model computes; "auto" is the accelerator if there is one.

    Raises:
        UserError: not a run, no checkpoint, no store, a split that holds nothing out for this part, or `filter_seen`
            for a task that does not recommend items.
    """
    opened = open_run(run, data=data, which=which, plugins=plugins, device=device)
    given = {"filter_seen": filter_seen, "users": users}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if users is not None and users < 1:
        raise UserError(f"users is {users}; give at least 1")
    if options and not isinstance(opened.task, RetrievalTask):
        name = next(iter(options))
        raise UserError(f"{name} is for runs of the task 'retrieval', not of '{opened.task.name}'; leave it out")
    result = opened.task.evaluate(opened.tables, opened.store, opened.split, part, **options)
    baselines = opened.task.measure_baselines(opened.store, opened.split, part, **options)
    protocol = f"{result.protocol}; {describe_checkpoint(opened.config, opened.split, opened.checkpoint, part)}"
    better = opened.task.evaluate_delivered(opened.tables, opened.store, opened.split, part, **options)
    delivered = Measured.of(better or result)
    return RunEvaluation(
        part,
        delivered.metrics,
        {name: system.metrics for name, system in baselines.items()},
        result.num_users,
        opened.checkpoint.step,
        protocol,
        delivered.standard_errors,
        {name: system.standard_errors for name, system in baselines.items()},
        delivered.metrics_exclude_seen,
        delivered.metrics_include_seen,
        opened.delivered,
        result.metrics,
    )
