"""Metrics of retrieval as pure functions of the held-out items' positions, and their descriptions.

Exactly one item is relevant for each user, so its position in the ranking of all candidates says everything:

- hr@k: the share of users whose item is among the first k. With one relevant item this is also recall@k.
- ndcg@k: the mean of 1 / log2(position + 1) over these users, and 0 for the others.
- mrr: the mean of 1 / position, not cut at any k.

An item that could not be recommended at all has the position MISSED: a miss at every k, which adds nothing to any
metric.

Each of these is a mean over users, so it has a standard error: how far it would vary if other users of the same kind
had been measured. `margin` turns it into a 95 % confidence interval, value ± margin.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr import plugins
from turbogr.config import Config
from turbogr.errors import UserError
from turbogr.evaluation.metric_info import MetricInfo

DEFAULT_KS = (10, 50, 200)
MISSED = 2**63 - 1
REPEATED = "missed"
"""How a repeated held-out item is scored. Stored with results because the rule changed once."""

Metric = Callable[[NDArray[np.int64]], Any]
"""A metric of a plug-in: a number from the positions of the held-out items, [n] int64, ascending."""

_FAMILIES = ("hr", "ndcg", "mrr")
_NORMAL_95 = 1.96  # 95 % of a normal distribution lie within so many standard deviations
_ATTRIBUTES = ("title", "higher_is_better", "format", "unit")
_NAME = re.compile(r"(hr|ndcg)@([1-9][0-9]*)|mrr")


def ranking_metrics(
    positions: NDArray[np.int64], ks: Sequence[int] = DEFAULT_KS, extra: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Return {"hr@k", "ndcg@k" for every k in `ks`, "mrr", and `extra`} of the 1-based `positions` [n], in fp64.

    The result does not change, to the last digit, with the order of the positions.

    Raises:
        ValueError: no positions, a position below 1, or a k below 1.
        UserError: a metric of `extra` returned something else than a finite number.
    """
    if len(positions) == 0:
        raise ValueError("no positions: metrics of zero users are undefined")
    if min(ks, default=1) < 1:
        raise ValueError(f"every k must be at least 1, got {list(ks)}")
    # Summing over distinct positions in ascending order makes the rounding independent of the order of the users.
    distinct, counts = np.unique(positions, return_counts=True)
    if distinct[0] < 1:
        raise ValueError(f"positions start at 1, got {distinct[0]}")
    num_users = len(positions)
    ranked = distinct < MISSED
    distinct, counts = distinct[ranked], counts[ranked]
    metrics: dict[str, float] = {}
    for k in ks:
        hits = slice(0, int(np.searchsorted(distinct, k, side="right")))
        metrics[f"hr@{k}"] = int(counts[hits].sum()) / num_users
        metrics[f"ndcg@{k}"] = float((counts[hits] / np.log2(distinct[hits] + 1.0)).sum()) / num_users
    metrics["mrr"] = float((counts / distinct).sum()) / num_users
    for name, metric in (extra or {}).items():
        metrics[name] = _finite(name, metric(np.sort(positions)))
    return metrics


def user_values(positions: NDArray[np.int64], name: str) -> NDArray[np.float64]:
    """Return what each user adds to a metric, [n]: their mean is the metric.

    Raises:
        ValueError: `name` is not hr@k, ndcg@k or mrr, so it need not be a mean over users.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"'{name}' is not a metric with a value per user")
    family, k = match[1] or name, int(match[2] or MISSED - 1)
    ranked = np.minimum(positions, MISSED - 1).astype(np.float64)
    gains = np.ones(len(ranked)) if family == "hr" else 1 / (np.log2(ranked + 1) if family == "ndcg" else ranked)
    values: NDArray[np.float64] = np.where((positions <= k) & (positions < MISSED), gains, 0.0)
    return values


def has_user_values(name: str) -> bool:
    """Return whether a metric is a mean over users of `user_values`; a metric of a plug-in need not be one."""
    return _NAME.fullmatch(name) is not None


def standard_errors(positions: NDArray[np.int64], names: Iterable[str]) -> dict[str, float]:
    """Return the standard errors of the metrics `names` over the users with these positions [n], by name.

    A metric of a plug-in has none, because it need not be a mean over users; neither has any metric of a single user.
    """
    distinct, counts = np.unique(positions, return_counts=True)  # as in ranking_metrics: the order does not matter
    if len(positions) < 2:
        return {}
    known = [name for name in names if has_user_values(name)]
    return {name: _standard_error(user_values(distinct, name), counts) for name in known}


def paired_difference(positions: NDArray[np.int64], others: NDArray[np.int64], name: str) -> tuple[float, float]:
    """Return a metric of `positions` [n] minus that of `others` [n] of the same users, and the standard error of that.

    The difference is taken user by user, so what makes a user easy or hard for both does not count as noise.
    """
    differences = user_values(positions, name) - user_values(others, name)
    distinct, counts = np.unique(differences, return_counts=True)
    error = _standard_error(distinct, counts) if len(differences) > 1 else math.nan
    return float(differences.mean()), error


def _standard_error(values: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    """Return the standard error of the mean of `values`, each of which occurs `counts` times."""
    num = int(counts.sum())
    mean = float((counts * values).sum()) / num
    return math.sqrt(float((counts * (values - mean) ** 2).sum()) / (num - 1) / num)


def margin(standard_error: float, num_users: int) -> float:
    """Return half the width of the 95 % confidence interval: the value ± this margin.

    Where all users have the same value, e.g. not one hit, the normal interval would be empty; the margin is then 3 / n,
    the largest rate that shows itself in none of n users once in twenty times.
    """
    return _NORMAL_95 * standard_error if standard_error > 0 else min(1.0, 3 / num_users)


def extra_metrics(config: Config) -> dict[str, Metric]:
    """Return the metrics of plug-ins that `evaluate.metrics` names.

    Raises:
        UserError: an unknown name, or one of a metric that is always measured.
    """
    for name in config.evaluate.metrics:
        if _NAME.fullmatch(name):
            raise UserError(f"evaluate.metrics names '{name}', which is measured anyway; leave it out")
    components = [plugins.find("metric", name) for name in config.evaluate.metrics]
    return {c.name: functools.partial(c.make, options=config.options.get(c.name)) for c in components}


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"the metric '{name}' returned {value!r}; it must return a finite number")
    return number


def describe_metric(name: str) -> MetricInfo:
    """Return the description of a metric of retrieval.

    A plug-in describes its metric by attributes of the function: title, higher_is_better, format and unit, as in
    `MetricInfo`. A name without a description is a number of which more is better.

    Raises:
        UserError: a plug-in's attribute of a wrong type.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return _describe_extra(name)
    family, k = match[1] or name, match[2]
    info = MetricInfo(name, name.upper(), format="share", family=family, preferred=k in ("10", None))
    if family != "hr":
        return info
    sentence = f"puts the next item in its top {k} for {{value}} of the users"
    return replace(info, unit="share of users", sentence=sentence)


def _describe_extra(name: str) -> MetricInfo:
    if name not in plugins.names("metric"):
        return MetricInfo(name, name)
    component = plugins.find("metric", name)
    given = {key: getattr(component.factory, key) for key in _ATTRIBUTES if hasattr(component.factory, key)}
    info = MetricInfo.read({"name": name, "title": name, **given})
    if info is None:
        raise UserError(f"the metric '{name}' of {component.origin} has an attribute of a wrong type: {given}")
    return info


def describe_metrics(names: Iterable[str]) -> list[MetricInfo]:
    """Return the descriptions of metrics of retrieval in the order in which they are shown.

    Hit rates come first, then NDCG, MRR and others; within a family the smallest cut-off comes first.
    """

    def order(info: MetricInfo) -> tuple[int, int]:
        if info.family not in _FAMILIES:
            return len(_FAMILIES), 0
        return _FAMILIES.index(info.family), int(info.name.partition("@")[2] or 0)

    return sorted((describe_metric(name) for name in names), key=order)
