"""What a run's evaluation says of what it delivers, of the model and of the baselines: metrics, and results by user."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turbogr import plugins
from turbogr.evaluation.baseline_titles import title_of
from turbogr.evaluation.metric_info import Coverage, MetricInfo
from turbogr.evaluation.metrics import has_user_values, margin, paired_difference, user_values
from turbogr.evaluation.user_positions import DELIVERED, MODEL, UserPositions, main_system
from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.runs import metrics_of

_OWN_FIRST = {DELIVERED: 0, MODEL: 1}
INTERVAL = "± is a 95 % confidence interval: how far the mean would vary with other users of the same kind."


@dataclass(frozen=True)
class Scores:
    """The metrics of one held-out part by system and name; the first system, `main`, is what the run recommends with.

    It is the model, or what is delivered in its place; then the model's own metrics follow. `metrics` describes them,
    in the order in which they are shown; `errors` are standard errors by system and name, and
    `by_user` the results of every user, where the run has them. `delivered_method` is the simple method that is
    delivered alone, if one is: the run cannot beat it.
    """

    part: str
    metrics: list[MetricInfo]
    systems: dict[str, dict[str, float]]
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    num_users: int | None = None
    by_user: UserPositions | None = None
    delivered_method: str | None = None

    @property
    def main(self) -> str:
        return main_system(self.systems)

    @property
    def own(self) -> list[str]:
        """The systems that are the run's own: what it delivers, and its model."""
        return [name for name in (DELIVERED, MODEL) if name in self.systems]

    @property
    def main_values(self) -> dict[str, float]:
        return self.systems[self.main]

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        return {name: values for name, values in self.systems.items() if name not in self.own}

    def ordered_baselines(self, metric: MetricInfo) -> list[str]:
        """Return the baselines that have a metric, the best first."""
        found = [name for name, values in self.baselines.items() if math.isfinite(values.get(metric.name, math.nan))]
        sign = -1 if metric.higher_is_better else 1
        return sorted(found, key=lambda name: sign * self.systems[name][metric.name])

    def rivals(self, metric: MetricInfo) -> list[str]:
        """Return the baselines that the run can beat, the best first."""
        return [name for name in self.ordered_baselines(metric) if name != self.delivered_method]

    def margin(self, system: str, metric: str) -> float:
        """Return half the width of the 95 % confidence interval, NaN where it is unknown."""
        error = self.errors.get(system, {}).get(metric)
        return math.nan if error is None or self.num_users is None else margin(error, self.num_users)

    def difference(self, metric: str, system: str) -> tuple[float, float]:
        """Return the metric of `main` minus that of a system, user by user, and its margin; NaN where it is unknown."""
        if self.by_user is None or system not in self.by_user.positions:
            return math.nan, math.nan
        return difference_of(self.by_user, self.by_user, metric, other=system)


def difference_of(first: UserPositions, second: UserPositions, metric: str, *, other: str) -> tuple[float, float]:
    """Return a metric of what a run delivers minus that of a system of another run, user by user, with its margin."""
    if not has_user_values(metric):
        return math.nan, math.nan
    value, error = paired_difference(first.positions[first.main], second.positions[other], metric)
    if value == 0 and error == 0:
        return 0.0, 0.0
    return value, margin(error, len(first.users)) if math.isfinite(error) else math.nan


def scores_of(run: RunData) -> list[Scores]:
    """Return the scores of every part that the model was measured on, the test part first."""
    evaluation = run.evaluation or {}
    parts = evaluation.get("parts")
    if not isinstance(parts, dict):
        return []
    found = []
    for part in sorted(parts, key=lambda name: (name != "test", name)):
        systems = {name: values for name, values in _measured(parts.get(part)).items() if values}
        if MODEL in systems:
            systems = {name: systems[name] for name in sorted(systems, key=lambda name: _OWN_FIRST.get(name, 2))}
            errors = _measured((_mapping(evaluation.get("standard_errors"))).get(part))
            metrics = run.folder.describe_metrics(systems[MODEL])
            by_user = _by_user(run, part, systems)
            method = _delivered_method(run) if DELIVERED in systems else None
            found.append(Scores(part, metrics, systems, errors, _num_users(run, part, by_user), by_user, method))
    return found


def _delivered_method(run: RunData) -> str | None:
    """Return the simple method that is delivered alone, None for a sum."""
    components = (run.delivered or {}).get("components")
    only = components[0] if isinstance(components, list) and len(components) == 1 else None
    return str(only["name"]) if isinstance(only, dict) and "name" in only else None


def _measured(systems: Any) -> dict[str, dict[str, float]]:
    return {str(name): metrics_of(values) for name, values in _mapping(systems).items() if isinstance(values, dict)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _num_users(run: RunData, part: str, by_user: UserPositions | None) -> int | None:
    if by_user is not None:
        return len(by_user.users)
    users = (run.evaluation or {}).get("num_users")
    users = users.get(part) if isinstance(users, dict) else users
    number = wording.number(users)
    return int(number) if number >= 1 else None


def _by_user(run: RunData, part: str, systems: Mapping[str, Mapping[str, float]]) -> UserPositions | None:
    """Return the results by user if they are those behind the metrics: another rule may have been measured since."""
    step = wording.number((run.evaluation or {}).get("step"))
    if not step.is_integer() or not part.isidentifier():
        return None
    found = UserPositions.read(run.path, part, int(step))
    return found if found is not None and _agrees(found, systems) else None


def _agrees(by_user: UserPositions, systems: Mapping[str, Mapping[str, float]]) -> bool:
    main = main_system(systems)
    name = next(filter(has_user_values, systems[main]), None)
    if name is None or main != by_user.main:
        return False
    return abs(float(user_values(by_user.positions[main], name).mean()) - systems[main][name]) < 1e-9


def coverage_of(run: RunData) -> Coverage | None:
    """Return the run's coverage on the test part, or else on the part that was measured; None if it was not."""
    by_part = _mapping((run.evaluation or {}).get("coverage"))
    for part in sorted(by_part, key=lambda name: name != "test"):
        numbers = [wording.number(_mapping(by_part[part]).get(key.name)) for key in dataclasses.fields(Coverage)]
        if all(number >= 1 for number in numbers):
            return Coverage(*map(int, numbers))
    return None


def model_title(run: RunData) -> str:
    """Return the model's name as the literature writes it; runs of version 0.1 have recorded its key only."""
    name = _model_key(run)
    if title := run.part("model").get("title"):
        return str(title)
    return plugins.find("block", name).title if name in plugins.built_in_names("block") else title_of(name)


def _model_key(run: RunData) -> str:
    return str(run.part("model").get("name") or run.setting("model", "name") or "model")


def system_title(run: RunData, system: str) -> str:
    """Return what a system is called in a table."""
    return model_title(run) if system == MODEL else title_of(system)


def delivered_title(run: RunData) -> str:
    """Return what the run delivers, in words; the model's title where that is all."""
    label = str((run.delivered or {}).get("label") or "delivered")
    return re.sub(rf"\b{re.escape(_model_key(run))}\b", lambda _: model_title(run), label)


def part_name(part: str, run: RunData | None = None) -> str:
    """Return what a held-out part is called in a sentence: its items, or of a run that predicts actions its events."""
    noun = "events" if run is not None and run.predicts_actions else "items"
    return {"test": f"test {noun}", "valid": f"validation {noun}"}.get(part, part)


def direction(metric: MetricInfo) -> str:
    """Return the caption of a figure whose metric should be low, else nothing."""
    return "" if metric.higher_is_better else "Lower is better."


def same_scale(metrics: list[MetricInfo]) -> list[list[MetricInfo]]:
    """Group metrics that can share an axis: those of the same format and direction, in the order of the first ones."""
    groups: dict[tuple[str, bool], list[MetricInfo]] = {}
    for metric in metrics:
        groups.setdefault((metric.format, metric.higher_is_better), []).append(metric)
    return list(groups.values())


def plus_minus(amount: float) -> str:
    """Return ± and an amount in four digits; empty where it is unknown."""
    return f"± {amount:.4f}" if math.isfinite(amount) else ""


def signed(value: float) -> str:
    """Return a difference with its sign in four digits: +0.0123."""
    return "0.0000" if value == 0 else f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


def verdict(value: float, amount: float, *, higher_is_better: bool = True) -> str:
    """Return "better", "worse" or, where the interval of a difference has 0 in it, "noise"."""
    if not math.isfinite(amount) or abs(value) <= amount:
        return "noise"
    return "better" if (value > 0) == higher_is_better else "worse"
