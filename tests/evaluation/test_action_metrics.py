"""Metrics of actions against their definitions, written as loops over all pairs."""

import itertools
import math

import numpy as np
import pytest

from turbogr.evaluation import action_metrics as metrics

SEEDS = range(6)


def events(seed, n=60, num_users=7, levels=9):
    """Labels, predictions with many ties, and users in no order."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(1, levels, n) / levels
    labels = (rng.random(n) < scores).astype(np.float64)
    return labels, scores, rng.integers(0, num_users, n) * 1000


def auc_of_pairs(labels, scores):
    """The definition, over all pairs of events with different labels; None if there are none."""
    won = [
        0.5 if a == b else float(a > b)
        for (y, a), (z, b) in itertools.product(zip(labels, scores, strict=True), repeat=2)
        if y > z
    ]
    return sum(won) / len(won) if won else None


@pytest.mark.parametrize("seed", SEEDS)
def test_auc_is_the_share_of_pairs_in_order(seed):
    labels, scores, users = events(seed)
    assert metrics.auc(labels, scores, users).value == auc_of_pairs(labels, scores)
    assert metrics.order_auc(labels, scores, users).value == auc_of_pairs(labels, scores)


@pytest.mark.parametrize("seed", SEEDS)
def test_order_auc_of_numbers_is_the_share_of_pairs_in_order(seed):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 12, 50) / 4, rng.integers(0, 15, 50) / 8
    assert metrics.order_auc(labels, scores).value == pytest.approx(auc_of_pairs(labels, scores), abs=1e-15)


def test_both_areas_have_the_same_error():
    labels, scores, users = events(3, n=500)
    one, other = metrics.auc(labels, scores, users), metrics.order_auc(labels, scores, users)
    assert one.error == pytest.approx(other.error, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_gauc_weights_users_by_their_events(seed):
    labels, scores, users = events(seed, n=40, num_users=12)
    weighted, weight, one_class = 0.0, 0, 0
    for user in set(users):
        mine = users == user
        value = auc_of_pairs(labels[mine], scores[mine])
        if value is None:
            one_class += 1
        else:
            weighted, weight = weighted + value * mine.sum(), weight + mine.sum()
    found = metrics.gauc(labels, scores, users)
    assert found.gauc.value == pytest.approx(weighted / weight, abs=1e-15)
    assert (found.num_events, found.num_one_class) == (weight, one_class)
    assert found.num_users == len(set(users)) - one_class
    assert one_class, "the case must have such users"


@pytest.mark.parametrize("seed", SEEDS)
def test_log_loss_entropy_and_calibration(seed):
    labels, scores, _ = events(seed)
    losses = [-math.log(p if y else 1 - p) for y, p in zip(labels, scores, strict=True)]
    rate = sum(labels) / len(labels)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert metrics.log_loss(labels, scores).value == pytest.approx(sum(losses) / len(losses), rel=1e-14)
    found = metrics.normalised_entropy(labels, scores).value
    assert found == pytest.approx(sum(losses) / len(losses) / entropy, rel=1e-14)
    assert metrics.calibration(labels, scores).value == pytest.approx(sum(scores) / sum(labels), rel=1e-14)
    assert metrics.mean_absolute_error(labels, scores).value == pytest.approx(
        sum(abs(y - p) for y, p in zip(labels, scores, strict=True)) / len(labels), rel=1e-14
    )


def test_the_rate_of_the_events_has_a_normalised_entropy_of_one():
    labels, _, _ = events(0)
    constant = np.full(len(labels), labels.mean())
    assert metrics.normalised_entropy(labels, constant).value == pytest.approx(1, rel=1e-14)
    assert metrics.auc(labels, constant).value == 0.5
    assert metrics.calibration(labels, constant).value == pytest.approx(1, rel=1e-14)


def test_a_wrong_certainty_costs_much_but_not_everything():
    loss = metrics.log_loss(np.array([1.0, 0.0]), np.array([0.0, 1.0])).value
    assert loss == pytest.approx(-math.log(metrics.SMALLEST), rel=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_the_events_changes_no_area_and_no_digit(seed):
    labels, scores, users = events(seed, n=200)
    moved = np.random.default_rng(seed + 100).permutation(len(labels))
    for function in (metrics.auc, metrics.order_auc):
        assert function(labels, scores).value == function(labels[moved], scores[moved]).value
    straight, other = (metrics.gauc(labels[i], scores[i], users[i]) for i in (np.arange(200), moved))
    assert straight == other


STATISTICS = {
    "auc": lambda y, p, u: metrics.auc(y, p, u),
    "order_auc": lambda y, p, u: metrics.order_auc(np.round(p + y, 1), p, u),
    "gauc": lambda y, p, u: metrics.gauc(y, p, u).gauc,
    "log_loss": lambda y, p, u: metrics.log_loss(y, p, u),
    "ne": lambda y, p, u: metrics.normalised_entropy(y, p, u),
    "calibration": lambda y, p, u: metrics.calibration(y, p, u),
    "mae": lambda y, p, u: metrics.mean_absolute_error(y, p, u),
}


def correlated_events(seed, num_users=150):
    """Users with 1 to 12 events whose positives depend on the user."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(num_users), rng.integers(1, 13, num_users))
    taste = rng.normal(0, 1, num_users)[users]
    x = rng.normal(0, 1, len(users))
    labels = (rng.random(len(users)) < 1 / (1 + np.exp(-taste - x))).astype(np.float64)
    return labels, np.round(1 / (1 + np.exp(-x - 0.3 * taste)), 2).clip(0.01, 0.99), users


@pytest.mark.parametrize("name", STATISTICS)
def test_standard_errors_are_those_of_drawing_users_again(name):
    labels, scores, users = correlated_events(0)
    statistic = STATISTICS[name]
    rng = np.random.default_rng(1)
    events_of = [np.flatnonzero(users == user) for user in range(150)]
    values = []
    for _ in range(300):
        drawn = rng.integers(0, 150, 150)
        index = np.concatenate([events_of[user] for user in drawn])
        again = np.repeat(np.arange(150), [len(events_of[user]) for user in drawn])
        values.append(statistic(labels[index], scores[index], again).value)
    assert statistic(labels, scores, users).error == pytest.approx(np.std(values), rel=0.2)


def test_users_with_one_class_alone_leave_no_gauc():
    found = metrics.gauc(np.array([1, 1, 0.0]), np.array([0.1, 0.2, 0.3]), np.array([5, 5, 6]))
    assert math.isnan(found.gauc.value) and (found.num_users, found.num_one_class) == (0, 2)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_leaves_no_area_and_no_entropy(label):
    labels, scores = np.full(4, label), np.array([0.1, 0.2, 0.2, 0.9])
    for function in (metrics.auc, metrics.normalised_entropy, metrics.order_auc):
        assert math.isnan(function(labels, scores).value)
    assert metrics.roc_points(labels, scores) == []
    assert math.isnan(metrics.calibration(labels, scores).value) == (label == 0)


def test_no_events_leave_nothing():
    none = np.zeros(0)
    for function in STATISTICS.values():
        assert math.isnan(function(none, none, none.astype(np.int64)).value)
    assert metrics.calibration_bins(none, none) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_roc_points_lie_on_the_curve_and_its_area_is_the_auc(seed):
    labels, scores, _ = events(seed)
    points = metrics.roc_points(labels, scores)
    exact = {
        (float((scores[labels == 0] >= t).mean()), float((scores[labels == 1] >= t).mean()))
        for t in [*scores.tolist(), np.inf]
    }
    assert set(points) == exact and points == sorted(points)
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    assert area == pytest.approx(metrics.auc(labels, scores).value, abs=1e-12)


def test_a_long_roc_is_thinned_and_keeps_its_area():
    rng = np.random.default_rng(0)
    labels = (rng.random(5000) < 0.1).astype(np.float64)
    scores = rng.random(5000) + labels
    points = metrics.roc_points(labels, scores, most=100)
    assert len(points) <= 101 and points[0] == (0, 0) and points[-1] == (1, 1)
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    assert area == pytest.approx(metrics.auc(labels, scores).value, abs=2e-3)


def test_calibration_bins_hold_every_event_once_and_keep_ties_together():
    labels, scores, users = events(4, n=500, levels=40)
    bins = metrics.calibration_bins(labels, scores, users)
    assert sum(found.size for found in bins) == 500 and 5 < len(bins) <= 10
    assert sum(found.size * found.observed for found in bins) == pytest.approx(labels.sum())
    assert sum(found.size * found.predicted for found in bins) == pytest.approx(scores.sum())
    means = [found.predicted for found in bins]
    assert means == sorted(means)
    assert len(metrics.calibration_bins(labels, np.full(500, 0.3), users)) == 1
