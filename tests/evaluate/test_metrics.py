from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.evaluate.metrics import MISSED, ranking_metrics

rank_lists = st.lists(st.integers(1, 400), min_size=1, max_size=60)


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


@given(rank_lists)
def test_metrics_are_the_means_of_their_definitions(ranks: list[int]) -> None:
    metrics = ranking_metrics(np.array(ranks))
    for k in (10, 50, 200):
        assert metrics[f"hr@{k}"] == sum(rank <= k for rank in ranks) / len(ranks)
        gains = [1 / math.log2(rank + 1) if rank <= k else 0.0 for rank in ranks]
        assert metrics[f"ndcg@{k}"] == pytest.approx(math.fsum(gains) / len(ranks), rel=1e-14)
    assert metrics["mrr"] == pytest.approx(math.fsum(1 / rank for rank in ranks) / len(ranks), rel=1e-14)


@given(rank_lists, st.randoms(use_true_random=False))
def test_order_of_users_does_not_change_a_digit(ranks: list[int], random: object) -> None:
    shuffled = list(ranks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranking_metrics(np.array(ranks)) == ranking_metrics(np.array(shuffled))


@given(rank_lists, st.integers(0, 59))
def test_a_better_rank_never_hurts(ranks: list[int], place: int) -> None:
    before = ranking_metrics(np.array(ranks))
    place %= len(ranks)
    ranks[place] = max(1, ranks[place] - 1)
    after = ranking_metrics(np.array(ranks))
    assert all(after[name] >= before[name] for name in before)
    assert all(0 <= value <= 1 for value in after.values())


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="zero users"):
        ranking_metrics(np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="start at 1, got 0"):
        ranking_metrics(np.array([3, 0]))
    with pytest.raises(ValueError, match="at least 1"):
        ranking_metrics(np.array([3]), ks=(0, 10))
