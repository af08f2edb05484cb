from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.evaluation.metric_info import MetricInfo
from turbogr.evaluation.metrics import (
    MISSED,
    describe_metric,
    describe_metrics,
    margin,
    paired_difference,
    ranking_metrics,
    standard_errors,
    user_values,
)

position_lists = st.lists(st.integers(1, 400), min_size=1, max_size=60)


def test_a_case_worked_out_by_hand() -> None:
    metrics = ranking_metrics(np.array([1, 3, 10, 11]), ks=(3, 10))
    assert metrics == {
        "hr@3": 0.5,
        "ndcg@3": pytest.approx((1 + 1 / 2) / 4, abs=1e-15),
        "hr@10": 0.75,
        "ndcg@10": pytest.approx((1 + 1 / 2 + 1 / math.log2(11)) / 4, abs=1e-15),
        "mrr": pytest.approx((1 + 1 / 3 + 1 / 10 + 1 / 11) / 4, abs=1e-15),
    }
    assert list(metrics) == ["hr@3", "ndcg@3", "hr@10", "ndcg@10", "mrr"]


def test_what_cannot_be_recommended_is_a_miss_at_every_k() -> None:
    metrics = ranking_metrics(np.array([2, MISSED, MISSED, 4]), ks=(3, 10**12))
    assert metrics["hr@3"] == 0.25
    assert metrics["hr@1000000000000"] == 0.5
    assert metrics["ndcg@1000000000000"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / 4, abs=1e-15)
    assert metrics["mrr"] == (1 / 2 + 1 / 4) / 4
    assert set(ranking_metrics(np.array([MISSED]), ks=(10, MISSED)).values()) == {0.0}


@given(position_lists)
def test_metrics_are_the_means_of_their_definitions(positions: list[int]) -> None:
    metrics = ranking_metrics(np.array(positions))
    for k in (10, 50, 200):
        assert metrics[f"hr@{k}"] == sum(position <= k for position in positions) / len(positions)
        gains = [1 / math.log2(position + 1) if position <= k else 0.0 for position in positions]
        assert metrics[f"ndcg@{k}"] == pytest.approx(math.fsum(gains) / len(positions), rel=1e-14)
    reciprocal = math.fsum(1 / position for position in positions)
    assert metrics["mrr"] == pytest.approx(reciprocal / len(positions), rel=1e-14)


@given(position_lists, st.randoms(use_true_random=False))
def test_order_of_users_does_not_change_a_digit(positions: list[int], random: object) -> None:
    shuffled = list(positions)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranking_metrics(np.array(positions)) == ranking_metrics(np.array(shuffled))


@given(position_lists, st.integers(0, 59))
def test_a_better_position_never_hurts(positions: list[int], user: int) -> None:
    before = ranking_metrics(np.array(positions))
    user %= len(positions)
    positions[user] = max(1, positions[user] - 1)
    after = ranking_metrics(np.array(positions))
    assert all(after[name] >= before[name] for name in before)
    assert all(0 <= value <= 1 for value in after.values())


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="zero users"):
        ranking_metrics(np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="start at 1, got 0"):
        ranking_metrics(np.array([3, 0]))
    with pytest.raises(ValueError, match="at least 1"):
        ranking_metrics(np.array([3]), ks=(0, 10))


def test_descriptions_are_in_the_order_of_tables() -> None:
    names = list(ranking_metrics(np.array([1, 3]), ks=(200, 10, 50)))
    assert [info.title for info in describe_metrics(names)] == [
        *("HR@10", "HR@50", "HR@200"),
        *("NDCG@10", "NDCG@50", "NDCG@200"),
        "MRR",
    ]
    assert all(info.higher_is_better and info.format == "share" for info in describe_metrics(names))
    assert describe_metric("hr@5").say("31 %") == "puts the next item in its top 5 for 31 % of the users"
    assert describe_metric("mrr").say("31 %") == "reaches MRR 31 %"


@pytest.mark.parametrize("name", ["logloss", "hr", "hr@", "hr@0", "hr@x", "mrr@10", "HR@10", ""])
def test_another_name_is_described_as_a_number(name: str) -> None:
    assert describe_metric(name) == MetricInfo(name, name)


@given(st.lists(st.one_of(st.integers(1, 400), st.just(MISSED)), min_size=2, max_size=60), st.randoms())
def test_standard_errors_are_those_of_the_values_of_the_users(positions: list[int], random: object) -> None:
    metrics = ranking_metrics(np.array(positions))
    errors = standard_errors(np.array(positions), [*metrics, "mean_position"])
    assert list(errors) == list(metrics), "a metric of a plug-in has none"
    for name, value in metrics.items():
        values = user_values(np.array(positions), name)
        assert values.mean() == pytest.approx(value, rel=1e-12, abs=1e-15)
        spread = values.std(ddof=1) / math.sqrt(len(positions))
        assert errors[name] == pytest.approx(spread, rel=1e-9, abs=1e-12)
    random.shuffle(positions)  # type: ignore[attr-defined]
    assert standard_errors(np.array(positions), metrics) == errors


def test_a_hit_rate_has_the_binomial_standard_error() -> None:
    positions = np.array([1] * 30 + [11] * 70)
    assert standard_errors(positions, ["hr@10"])["hr@10"] == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert standard_errors(np.array([3]), ["hr@10"]) == {}


def test_a_95_percent_interval_covers_the_true_rate_about_so_often() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for hits in rng.binomial(400, 0.1, size=2000):
        positions = np.where(np.arange(400) < hits, 1, 11)
        error = standard_errors(positions, ["hr@10"])["hr@10"]
        covered += abs(hits / 400 - 0.1) <= margin(error, 400)
    assert 0.92 < covered / 2000 < 0.97


def test_no_hit_at_all_is_not_taken_for_certainty() -> None:
    assert margin(standard_errors(np.array([50] * 60), ["hr@10"])["hr@10"], 60) == 3 / 60
    assert margin(0.0, 2) == 1.0
    assert margin(0.01, 100) == pytest.approx(0.0196)


def test_a_paired_difference_is_sharper_than_the_two_intervals() -> None:
    rng = np.random.default_rng(0)
    others = rng.integers(1, 200, size=500)
    positions = np.where(rng.random(500) < 0.1, np.maximum(others - 5, 1), others)
    difference, error = paired_difference(positions, others, "mrr")
    values, base = user_values(positions, "mrr"), user_values(others, "mrr")
    assert difference == pytest.approx(values.mean() - base.mean())
    assert error == pytest.approx((values - base).std(ddof=1) / math.sqrt(500))
    assert error < standard_errors(others, ["mrr"])["mrr"]
    assert paired_difference(others, others, "hr@10") == (0.0, 0.0)
    assert math.isnan(paired_difference(others[:1], others[:1], "hr@10")[1])


def test_only_the_own_metrics_have_a_value_per_user() -> None:
    with pytest.raises(ValueError, match="mean_position"):
        user_values(np.array([1]), "mean_position")
