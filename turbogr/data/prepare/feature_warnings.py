"""What looks odd in the features and actions of a prepared store: sentences for the user, none of them an error."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.order_statistics import auc
from turbogr.data.ranges import concatenated_ranges
from turbogr.data.split import Split
from turbogr.data.store import Store

_EVENTS_LOOKED_AT = 1 << 20
_TELLS = 0.99  # area under the ROC curve of a feature alone
_CORRELATES = 0.9999
_FEWEST_EVENTS = 100


def feature_warnings(store: Store) -> list[str]:
    """Return what is odd: constant columns, actions without positives, and features that give an action away."""
    columns = store.features.values()
    found = [sentence for column in columns if (sentence := _constant(column)) is not None]
    actions = [column for column in columns if column.owner == "action"]
    if actions:
        found += _single_class(store, [column for column in actions if column.info.kind == "binary"])
        found += _leaks(store, [column for column in columns if column.owner == "event"], actions)
    return found


def _constant(column: FeatureColumn) -> str | None:
    info = column.info
    if column.owner == "action" and info.low == info.high:
        what = "has no positive event" if info.high == 0 else f"is always {info.high:g}"
        return f"the action '{column.name}' {what}, so nothing can be learnt of it; leave it out of --actions"
    if column.owner == "event" and (info.size < 2 if info.kind == "category" else info.low == info.high):
        return (
            f"the event feature '{column.name}' is constant, so a model learns nothing from it; leave it out of "
            "--event-features"
        )
    return None


def _single_class(store: Store, actions: list[FeatureColumn]) -> Iterator[str]:
    """Yield a sentence for each action that both happens and does not, but not so in the test part."""
    starts, ends = Split.of(store).events("test")
    events = concatenated_ranges(starts, ends - starts)
    for column in actions:
        values = np.asarray(column.values[events], np.float64)
        values = values[~np.isnan(values)]
        if not len(values) or column.info.low == column.info.high or values.min() != values.max():
            continue
        yield (
            f"all {len(values):,} test events have {column.name} = {values[0]:g}, so its AUC means nothing; choose "
            "another cut with --split, or leave it out of --actions"
        )


def _leaks(store: Store, features: list[FeatureColumn], actions: list[FeatureColumn]) -> Iterator[str]:
    """Yield a sentence for each feature of events that is an action, or orders one nearly perfectly on its own."""
    events = np.arange(0, store.num_events, -(-store.num_events // _EVENTS_LOOKED_AT))
    for feature in features:
        for action in actions:
            if feature.name == action.name:
                yield (
                    f"the event feature '{feature.name}' is the action itself, which is not known yet when it is "
                    "predicted; leave it out of --event-features"
                )
                continue
            how = _gives_away(feature, action, events)
            if how is not None:
                yield (
                    f"the event feature '{feature.name}' alone tells the action '{action.name}' ({how}); is it known "
                    "before the user acts? If not, leave it out of --event-features"
                )


def _gives_away(feature: FeatureColumn, action: FeatureColumn, events: NDArray[np.int64]) -> str | None:
    labels = np.asarray(action.values[events], np.float64)
    values = np.asarray(feature.values[events])
    given = ~np.isnan(labels)
    if feature.info.kind == "number":
        given &= ~np.isnan(values)
    labels, values = labels[given], values[given]
    if len(labels) < _FEWEST_EVENTS or labels.min() == labels.max():
        return None
    if feature.info.kind == "category":
        # Rates of one half of the events, measured on the other: a rare category must not tell its own event.
        totals = np.bincount(values[::2] + 1, minlength=feature.info.size + 1)
        sums = np.bincount(values[::2] + 1, labels[::2], minlength=feature.info.size + 1)
        mean = labels[::2].mean()
        values, labels = ((sums + mean) / (totals + 1))[values[1::2] + 1], labels[1::2]
    if values.min() == values.max() or labels.min() == labels.max():
        return None
    if action.info.kind == "binary":
        area = auc(labels > 0, values)
        return f"AUC {area:.3f}" if max(area, 1 - area) >= _TELLS else None
    with np.errstate(invalid="ignore"):
        correlation = float(np.corrcoef(values.astype(np.float64), labels)[0, 1])
    return f"correlation {correlation:.4f}" if abs(correlation) >= _CORRELATES else None
