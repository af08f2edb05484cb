"""Metrics of predicted actions as pure functions of labels, predictions and users.

- AUC: the probability that a random positive event is predicted above a random negative one; equal predictions count
  half. Of numbers, `order_auc` is the same over all pairs of events with different values.
- GAUC: the AUC of every user's own events, averaged with the users' numbers of events as weights. Users whose events
  are all positive or all negative have none; they are left out and counted.
- log loss: the mean of -log of the probability that the prediction gave to what happened.
- normalised entropy: the log loss as a share of that of the best constant, the rate of the same events. Below 1 is
  better than knowing the rate.
- calibration: the sum of the predictions over the number of positives; 1 is right on average.
- MAE: the mean absolute error of a predicted number.

AUCs are counted in integers, so they are exact whatever the order of the events. Standard errors take the users as
drawn at random, not the events: what one user does is not independent. They are those of the linear part of each metric
(for AUC DeLong's, summed by user).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SMALLEST = 1e-12
"""Probabilities are taken as between this and 1 minus this in the log loss, which one wrong certainty would make
infinite."""


class Value(NamedTuple):
    """A metric and its standard error; NaN where it is not defined."""

    value: float
    error: float


_NONE = Value(math.nan, math.nan)


@dataclass(frozen=True)
class Grouped:
    """A GAUC, and how many users and events are part of it; the others have one class only."""

    gauc: Value
    num_users: int
    num_events: int
    num_one_class: int


def auc(labels: NDArray[Any], scores: NDArray[Any], users: Ints | None = None) -> Value:
    """Return the AUC of binary `labels` [n] under `scores` [n], with its standard error over `users` [n].

    Without users every event counts as a user of its own. It is NaN where one class is missing.
    """
    positive = np.asarray(labels, bool)
    below, equal = _pairs_below(positive, np.asarray(scores))
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return _NONE
    twice = int((2 * below + equal)[positive].sum())
    value = twice / (2 * num_positive * num_negative)
    others = np.where(positive, num_negative, num_positive)
    won = np.where(positive, below + 0.5 * equal, others - below - 0.5 * equal)
    shares = (won - value * others) / (num_positive * num_negative)
    return Value(value, _error_of_sum(shares, users))


def _pairs_below(positive: NDArray[np.bool_], scores: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return how many events of the other class every event is above, and how many have its score."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(order) else np.zeros(0, np.int64)
    run = np.zeros(len(order), np.int64)
    run[starts[1:]] = 1
    run = np.cumsum(run)
    below, equal = np.empty((2, len(order)), np.int64)
    for kind in (False, True):
        others = (positive[order] != kind).astype(np.int64)
        in_run = np.add.reduceat(others, starts) if len(starts) else others
        before = np.cumsum(in_run) - in_run
        mine = others == 0
        below[order[mine]], equal[order[mine]] = before[run[mine]], in_run[run[mine]]
    return below, equal


def gauc(labels: NDArray[Any], scores: NDArray[Any], users: Ints) -> Grouped:
    """Return the GAUC of binary `labels` [n] under `scores` [n] of the events of `users` [n]."""
    positive = np.asarray(labels, bool)
    order = np.lexsort((scores, users))
    user, score, label = users[order], np.asarray(scores)[order], positive[order]
    if not len(order):
        return Grouped(_NONE, 0, 0, 0)
    new_user = np.r_[True, user[1:] != user[:-1]]
    starts = np.flatnonzero(new_user)
    runs = np.flatnonzero(new_user | np.r_[True, score[1:] != score[:-1]])
    # Per run of equal scores of a user: the negatives below it in the user, and its own.
    negatives = np.add.reduceat(~label, runs, dtype=np.int64)
    positives = np.add.reduceat(label, runs, dtype=np.int64)
    first_runs = np.searchsorted(runs, starts)
    before = np.cumsum(negatives) - negatives
    before -= np.repeat(before[first_runs], np.diff(first_runs, append=len(runs)))
    twice = np.add.reduceat(positives * (2 * before + negatives), first_runs)
    all_positives = np.add.reduceat(positives, first_runs)
    events = np.diff(starts, append=len(order))
    pairs = all_positives * (events - all_positives)
    both = pairs > 0
    if not both.any():
        return Grouped(_NONE, 0, 0, len(starts))
    values, weights = twice[both] / (2 * pairs[both]), events[both]
    total = int(weights.sum())
    value = float(values @ weights) / total
    error = _error_of_sum(weights * (values - value) / total, None)
    return Grouped(Value(value, error), int(both.sum()), total, int((~both).sum()))


def log_losses(labels: NDArray[Any], probabilities: NDArray[Any]) -> Floats:
    """Return the log loss of every event, [n]."""
    p = np.clip(np.asarray(probabilities, np.float64), SMALLEST, 1 - SMALLEST)
    return -np.where(np.asarray(labels, bool), np.log(p), np.log1p(-p))


def log_loss(labels: NDArray[Any], probabilities: NDArray[Any], users: Ints | None = None) -> Value:
    """Return the mean log loss of binary `labels` [n]; NaN without events."""
    return _mean(log_losses(labels, probabilities), users)


def normalised_entropy(labels: NDArray[Any], probabilities: NDArray[Any], users: Ints | None = None) -> Value:
    """Return the log loss over that of the rate of the same events; NaN where one class is missing."""
    y = np.asarray(labels, np.float64)
    if not len(y) or not 0 < y.sum() < len(y):
        return _NONE
    losses, rate = log_losses(y, probabilities), float(y.mean())
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    value = float(losses.mean()) / entropy
    slope = math.log1p(-rate) - math.log(rate)  # of the entropy by the rate
    shares = (losses - value * (entropy + slope * (y - rate))) / (entropy * len(y))
    return Value(value, _error_of_sum(shares, users))


def calibration(labels: NDArray[Any], predictions: NDArray[Any], users: Ints | None = None) -> Value:
    """Return the sum of `predictions` [n] over that of `labels` [n]; NaN where the latter is 0."""
    y, p = np.asarray(labels, np.float64), np.asarray(predictions, np.float64)
    observed = float(y.sum())
    if not observed:
        return _NONE
    value = float(p.sum()) / observed
    return Value(value, _error_of_sum((p - value * y) / observed, users))


class Bin(NamedTuple):
    """Events with similar predictions: how many, what was predicted and observed on average, and the error of that."""

    size: int
    predicted: float
    observed: float
    error: float


def calibration_bins(
    labels: NDArray[Any], predictions: NDArray[Any], users: Ints | None = None, num_bins: int = 10
) -> list[Bin]:
    """Cut the events into about equal numbers by their predictions; equal predictions stay together."""
    y, p = np.asarray(labels, np.float64), np.asarray(predictions, np.float64)
    if not len(p):
        return []
    ordered = np.sort(p)
    edges = np.unique(ordered[[len(p) * part // num_bins for part in range(1, num_bins)]])
    number = np.searchsorted(edges, p, side="right")
    found = []
    for part in np.unique(number):
        chosen = number == part
        mean = _mean(y[chosen], None if users is None else users[chosen])
        found.append(Bin(int(chosen.sum()), float(p[chosen].mean()), mean.value, mean.error))
    return found


def roc_points(labels: NDArray[Any], scores: NDArray[Any], most: int = 200) -> list[tuple[float, float]]:
    """Return at most about `most` points (false positive rate, true positive rate) of the ROC, from (0, 0) to (1, 1).

    Each is exact, one threshold between two different scores; [] where one class is missing.
    """
    positive = np.asarray(labels, bool)
    num_positive = int(positive.sum())
    if not 0 < num_positive < len(positive):
        return []
    scores = np.asarray(scores)
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    ends = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])
    true = np.cumsum(positive[order])[ends] / num_positive
    false = np.cumsum(~positive[order])[ends] / (len(positive) - num_positive)
    # Even steps along the curve, so that steep parts keep their points.
    way = true + false
    kept = np.unique(np.searchsorted(way, np.linspace(0, 2, most)[1:-1]).clip(0, len(way) - 1))
    points = list(zip(false[kept].tolist(), true[kept].tolist(), strict=True))
    return [(0.0, 0.0), *(point for point in points if point != (1.0, 1.0)), (1.0, 1.0)]


def mean_absolute_error(labels: NDArray[Any], predictions: NDArray[Any], users: Ints | None = None) -> Value:
    """Return the mean absolute error of predicted numbers [n]; NaN without events."""
    return _mean(np.abs(np.asarray(labels, np.float64) - np.asarray(predictions, np.float64)), users)


def order_auc(labels: NDArray[Any], scores: NDArray[Any], users: Ints | None = None) -> Value:
    """Return the share of pairs of events with different `labels` [n] that `scores` [n] put in their order.

    Equal scores count half. For binary labels this is the AUC. NaN where all labels are equal.
    """
    y, s = (np.unique(values, return_inverse=True)[1].astype(np.int64) for values in (labels, scores))
    n = len(y)
    same_label = np.bincount(y)[y] if n else y
    pairs = n - same_label
    if not pairs.any():
        return _NONE
    same_score = np.bincount(s)[s]
    same_both = np.unique(y * (int(s.max()) + 1) + s, return_inverse=True, return_counts=True)
    tied = same_score - same_both[2][same_both[1]]
    order = np.lexsort((s, y))
    wrong = np.empty(n, np.int64)
    wrong[order] = _inversions(s[order])
    twice = 2 * (pairs - wrong) - tied
    value = int(twice.sum()) / (2 * int(pairs.sum()))
    shares = (twice / 2 - value * pairs) / (int(pairs.sum()) / 2)
    return Value(value, _error_of_sum(shares, users))


def _inversions(values: Ints) -> Ints:
    """Return with how many others every value is in the wrong order: a larger one before it, or a smaller one after it.

    It sorts by one binary digit after the other, from the highest, and counts at each digit.
    """
    found = np.zeros(len(values), np.int64)
    place = np.arange(len(values))
    for bit in reversed(range(int(values.max()).bit_length() if len(values) else 0)):
        higher = values[place] >> (bit + 1)
        one = (values[place] >> bit) & 1
        starts = np.flatnonzero(np.r_[True, higher[1:] != higher[:-1]])
        sizes = np.diff(starts, append=len(place))
        ones_before = np.cumsum(one) - one
        ones_before -= np.repeat(ones_before[starts], sizes)
        zeros_after = np.repeat(np.add.reduceat(1 - one, starts), sizes)
        zeros_after -= np.arange(len(place)) - np.repeat(starts, sizes) - ones_before
        found[place] += np.where(one == 1, zeros_after, ones_before)
        place = place[np.argsort(higher * 2 + one, kind="stable")]
    return found


def _mean(values: Floats, users: Ints | None) -> Value:
    if not len(values):
        return _NONE
    mean = float(values.mean())
    return Value(mean, _error_of_sum((values - mean) / len(values), users))


def _error_of_sum(shares: Floats, users: Ints | None) -> float:
    """Return the standard error of a sum of centred `shares` [n] of events whose `users` [n] are drawn at random."""
    if users is not None:
        _, number = np.unique(users, return_inverse=True)
        shares = np.bincount(number, shares).astype(np.float64)
    num = len(shares)
    return math.sqrt(float(shares @ shares) * num / (num - 1)) if num > 1 else math.nan
