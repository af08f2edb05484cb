"""Descriptions of metrics: how a metric is named, formatted and compared, whichever task it belongs to.

Training, reports, sweeps and commands know metrics by these descriptions alone. A task lists them in the order in which
they are shown. They are written into run.json, so that a run can be shown without the code that measured it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class MetricInfo:
    """One metric.

    `name` is its key in files and configs, `title` its name for people. `format` is "share" for a share of one, which
    may be written as a percentage, "ratio" for one that is best at 1, else "number". `unit` is the title of an axis.
    Metrics of one `family` differ in a parameter only, such as hit rates at several cut-offs; the `preferred` one is
    shown where there is room for one.
    `sentence` is what `say` returns, with {title} and {value} in it.
    """

    name: str
    title: str
    higher_is_better: bool = True
    format: Literal["share", "number", "ratio"] = "number"
    unit: str = ""
    family: str = ""
    preferred: bool = False
    sentence: str = "reaches {title} {value}"

    def is_better(self, value: float, other: float) -> bool:
        """Return whether `value` is better than `other`; equal values are not, and NaN never is."""
        return self._goodness(value) > self._goodness(other)

    def best(self, values: Sequence[float]) -> int | None:
        """Return the index of the best value, the first of equal ones; None if no value is finite."""
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        return max(finite, key=lambda index: self._goodness(values[index]), default=None)

    def _goodness(self, value: float) -> float:
        """Return a number that is larger the better `value` is."""
        if self.format == "ratio":
            return -abs(math.log(value)) if value > 0 else -math.inf if value == value else math.nan
        return value if self.higher_is_better else -value

    @property
    def extreme(self) -> str:
        """What the best value is among all: the highest, the lowest, or the one closest to 1."""
        if self.format == "ratio":
            return "Closest to 1"
        return "Highest" if self.higher_is_better else "Lowest"

    @property
    def direction(self) -> str:
        """What is said beside the title where more is not better; "" where it is."""
        if self.format == "ratio":
            return "1 is best"
        return "" if self.higher_is_better else "lower is better"

    def say(self, value: str) -> str:
        """Return what a formatted value means, as the end of a sentence that begins with the model."""
        return self.sentence.replace("{title}", self.title).replace("{value}", value)

    @classmethod
    def read(cls, content: Any) -> MetricInfo | None:
        """Return the description that `dataclasses.asdict` wrote, None for anything else."""
        known = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        known.update(name=str, title=str)
        if not isinstance(content, Mapping) or not {"name", "title"} <= content.keys():
            return None
        kept = {key: value for key, value in content.items() if key in known}
        if not all(isinstance(value, known[key]) for key, value in kept.items()):
            return None
        if kept.get("format", "number") not in ("share", "number", "ratio"):
            return None
        return cls(**kept)


def one_per_family(metrics: Iterable[MetricInfo]) -> list[MetricInfo]:
    """Return the preferred metric of each family, or its first, in the order of `metrics`.

    The first of these is the headline metric of a task. A metric without a family is a family of its own.
    """
    families: dict[str, MetricInfo] = {}
    for metric in metrics:
        family = metric.family or metric.name
        if family not in families or (metric.preferred and not families[family].preferred):
            families[family] = metric
    return list(families.values())


def most_informative(metrics: Sequence[MetricInfo], limit: int, selecting: str | None = None) -> list[MetricInfo]:
    """Return at most `limit` metrics: all of the first family, one of each other, and the metric named `selecting`.

    Where these are too many, the last ones are left out, but not `selecting`.
    """
    if not metrics:
        return []
    first = metrics[0].family or metrics[0].name
    single = one_per_family(metrics)
    wanted = [m for m in metrics if m.name == selecting or m in single or (m.family or m.name) == first]
    dispensable = [m for m in reversed(wanted) if m.name != selecting][: max(0, len(wanted) - limit)]
    return [metric for metric in wanted if metric not in dispensable]


@dataclass(frozen=True)
class Coverage:
    """`num_shown` of `num_items` items are in a list of the `k` best of at least one of `num_users` users."""

    k: int
    num_shown: int
    num_items: int
    num_users: int

    @property
    def share(self) -> float:
        return self.num_shown / self.num_items
