"""Measuring predicted actions on the held-out events of a split: the events, their labels, and the result.

Every event of a part is predicted, each from what is known before it; after a cut in time these are all events there,
those of new users too. The metrics depend on the labels and predictions of these events alone, not on batches or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turbogr.data.ranges import concatenated_ranges
from turbogr.data.split import LEAVE_ONE_OUT, LEAVE_TWO_OUT, Split
from turbogr.data.store import Store
from turbogr.data.times import iso_time
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, did_you_mean, warn_caller
from turbogr.evaluation import action_metrics as am
from turbogr.evaluation.metric_info import MetricInfo

Metrics = dict[str, float]
Floats = NDArray[np.float64]

BINARY = ("auc", "gauc", "log_loss", "ne", "calibration")
REGRESSION = ("order_auc", "mae", "calibration")
_TITLES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "log_loss": "log loss",
    "ne": "normalised entropy",
    "calibration": "calibration",
    "order_auc": "AUC of the order",
    "mae": "mean absolute error",
}
_LOWER_IS_BETTER = ("log_loss", "ne", "mae")


class Target(Protocol):
    """What a task of a ranking model predicts: the store's action (None: that of the task's name), and its kind."""

    @property
    def action(self) -> str | None: ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class HeldOutActions:
    """The events of one part, in the order of the store, and what happened: NaN where that is not known.

    `events` [n], `users` [n] rows of the store, `labels` by task [n], `kinds` by task, "binary" or "regression".
    """

    part: str
    events: Int64Array
    users: Int64Array
    labels: dict[str, Floats]
    kinds: dict[str, str]
    skipped: dict[str, int]
    protocol: str

    @classmethod
    def of(cls, store: Store, split: Split, part: str, targets: Mapping[str, Target]) -> HeldOutActions:
        """Collect all events of `part` ("train", "valid" or "test").

        Raises:
            UserError: the part has no event, or the store has no such action.
        """
        starts, ends = split.events(part)
        lengths = ends - starts
        events = concatenated_ranges(starts, lengths)
        if not len(events):
            raise UserError(
                f"the split {split.rule!r} of {store.path} has no {part} event; choose cuts within the log's times, "
                "such as --split time:VALIDATION,TEST of `turbogr prepare`, or data.split of the recipe"
            )
        users = np.repeat(np.arange(store.num_users), lengths)
        labels = {
            name: np.array(_action(store, target.action or name)[events], np.float64)
            for name, target in targets.items()
        }
        missing = int((lengths == 0).sum())
        skipped = {f"no {part} event": missing} if missing else {}
        kinds = {name: target.kind for name, target in targets.items()}
        return cls(part, events, users, labels, kinds, skipped, _protocol(split, part, len(events), lengths))

    @property
    def num_users(self) -> int:
        return len(np.unique(self.users))


def action_labels(store: Store, name: str) -> Floats:
    """Return the labels of all events of a store, float64 [E], NaN where not known.

    Raises:
        UserError: the store has no such action.
    """
    return np.array(_action(store, name), np.float64)


def _action(store: Store, name: str) -> NDArray[Any]:
    column = store.features.get(f"action.{name}")
    if column is not None:
        return column.values
    known = sorted(column.name for column in store.features.values() if column.owner == "action")
    has = f"its actions are {', '.join(known)}" if known else "it has none"
    raise UserError(
        f"{store.path} has no action '{name}'; {has}. Actions are chosen by `turbogr prepare --actions`."
        f"{did_you_mean(name, known)}"
    )


def _protocol(split: Split, part: str, num_events: int, lengths: Int64Array) -> str:
    num_users = int((lengths > 0).sum())
    users = f"{num_users:,} user{'s' if num_users != 1 else ''}"
    if split.rule in (LEAVE_ONE_OUT, LEAVE_TWO_OUT):
        which = "last event" if part == "test" else "event before the last"
        return f"{split.rule}: the {which} of {users} is predicted from the user's events before it"
    cuts = [iso_time(int(cut)) for cut in split.rule.removeprefix("time:").split(",")]
    where = {"test": f"from {cuts[-1]} on", "valid": f"from {cuts[0]} until {cuts[-1]}", "train": f"before {cuts[0]}"}
    return (
        f"time cut: events before {cuts[0]} train; all {num_events:,} events of {users} {where[part]} are predicted, "
        "each from the user's events before it"
    )


@dataclass(frozen=True)
class ActionEvaluation:
    """The result on one part. Metrics that are not defined, such as the AUC of a single class, are not among `metrics`.

    `details` has, by task, what a page about the run shows: counts, points of the ROC, calibration by tenths, and under
    "undefined" why a metric is missing. It can be written as JSON.
    """

    part: str
    metrics: Metrics
    standard_errors: Metrics
    num_users: int
    num_events: int
    skipped: dict[str, int]
    protocol: str
    details: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure_actions(
    held_out: HeldOutActions, predictions: Mapping[str, NDArray[Any]], *, warn: bool = True
) -> ActionEvaluation:
    """Measure `predictions` [n] of every task, probabilities or numbers, in the order of `held_out.events`.

    Events whose action is not known are left out of the task and counted in its details. With `warn`, a metric that is
    not defined is warned of.

    Raises:
        UserError: a prediction that is not finite, or a probability that is not one.
    """
    metrics: Metrics = {}
    errors: Metrics = {}
    details: dict[str, dict[str, Any]] = {}
    for name, labels in held_out.labels.items():
        predicted = np.asarray(predictions[name], np.float64)
        assert predicted.shape == labels.shape, f"{predicted.shape} predictions of {labels.shape} events"
        binary = held_out.kinds[name] == "binary"
        _check(name, predicted, binary)
        known = ~np.isnan(labels)
        measure = _measure_binary if binary else _measure_numbers
        values, about = measure(labels[known], predicted[known], held_out.users[known])
        about = {"kind": held_out.kinds[name], "num_unknown": int((~known).sum()), **about}
        undefined = {measured: why for measured, value in values.items() if (why := _undefined(measured, value, about))}
        if undefined:
            about["undefined"] = undefined
            if warn:
                _warn(held_out.part, name, undefined)
        for measured, value in values.items():
            if measured not in undefined:
                metrics[f"{measured}/{name}"] = value.value
                if math.isfinite(value.error):
                    errors[f"{measured}/{name}"] = value.error
        details[name] = about
    return ActionEvaluation(
        held_out.part,
        metrics,
        errors,
        held_out.num_users,
        len(held_out.events),
        held_out.skipped,
        held_out.protocol,
        details,
    )


def _check(name: str, predicted: Floats, binary: bool) -> None:
    wrong = ~np.isfinite(predicted)
    if binary:
        wrong |= (predicted < 0) | (predicted > 1)
    if wrong.any():
        what = "a probability" if binary else "a finite number"
        raise UserError(
            f"a prediction of '{name}' is {predicted[wrong][0]:g}, which is not {what}; the model has diverged: train "
            "again with a smaller optimizer.lr"
        )


def _measure_binary(labels: Floats, p: Floats, users: Int64Array) -> tuple[dict[str, am.Value], dict[str, Any]]:
    by_user = am.gauc(labels, p, users)
    values = {
        "auc": am.auc(labels, p, users),
        "gauc": by_user.gauc,
        "log_loss": am.log_loss(labels, p, users),
        "ne": am.normalised_entropy(labels, p, users),
        "calibration": am.calibration(labels, p, users),
    }
    about = {
        "num_events": len(labels),
        "num_positive": int(labels.sum()),
        "gauc_users": by_user.num_users,
        "gauc_events": by_user.num_events,
        "one_class_users": by_user.num_one_class,
        "roc": am.roc_points(labels, p),
        "calibration": _bins(labels, p, users),
    }
    return values, about


def _measure_numbers(
    labels: Floats, predicted: Floats, users: Int64Array
) -> tuple[dict[str, am.Value], dict[str, Any]]:
    values = {
        "order_auc": am.order_auc(labels, predicted, users),
        "mae": am.mean_absolute_error(labels, predicted, users),
        "calibration": am.calibration(labels, predicted, users),
    }
    about = {
        "num_events": len(labels),
        "mean": float(labels.mean()) if len(labels) else None,
        "calibration": _bins(labels, predicted, users),
    }
    return values, about


def _bins(labels: Floats, predicted: Floats, users: Int64Array) -> list[list[float | None]]:
    """Return `calibration_bins` as JSON has them: an error that is not known, of a single user, is null."""
    bins = am.calibration_bins(labels, predicted, users)
    return [[value if math.isfinite(value) else None for value in found] for found in bins]


def _undefined(measured: str, value: am.Value, about: Mapping[str, Any]) -> str | None:
    """Return why a metric has no value, as the end of a sentence; None if it has one."""
    if math.isfinite(value.value):
        return None
    if not about["num_events"]:
        return "what happened is known of no event"
    if measured == "gauc" and 0 < about["num_positive"] < about["num_events"]:
        return f"each of the {about['one_class_users']:,} users has events of one class only"
    if about["kind"] == "binary":
        return f"all {about['num_events']:,} events are {'positive' if about['num_positive'] else 'negative'}"
    return f"all {about['num_events']:,} events have the same value" if measured == "order_auc" else "the sum is 0"


def _warn(part: str, name: str, undefined: Mapping[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for measured, why in undefined.items():
        by_reason.setdefault(why, []).append(_TITLES[measured])
    for why, titles in by_reason.items():
        warn_caller(
            f"'{name}' has no {', '.join(titles)} on the {part} part: {why}; choose another cut (data.split), or leave "
            "the task out"
        )


def action_metric_names(targets: Mapping[str, Target]) -> list[str]:
    """Return the keys of all metrics of some tasks."""
    return [
        f"{measured}/{name}"
        for name, target in targets.items()
        for measured in (BINARY if target.kind == "binary" else REGRESSION)
    ]


def describe_action_metrics(names: Iterable[str]) -> list[MetricInfo]:
    """Return the descriptions of metrics in the order in which they are shown: by metric, then by task as given."""
    order = list(_TITLES)
    split = [name.partition("/") for name in names]
    split.sort(key=lambda found: order.index(found[0]) if found[0] in order else len(order))
    first: dict[str, str] = {}
    for measured, _, name in split:
        first.setdefault(measured, name)
    return [_describe(measured, name, first[measured] == name) for measured, _, name in split]


def _describe(measured: str, name: str, preferred: bool) -> MetricInfo:
    title = f"{_TITLES.get(measured, measured)} of {name}" if name else measured
    return MetricInfo(
        f"{measured}/{name}" if name else measured,
        title,
        higher_is_better=measured not in _LOWER_IS_BETTER,
        format="ratio" if measured == "calibration" else "number",
        unit=_TITLES.get(measured, measured),
        family=measured,
        preferred=preferred,
    )
