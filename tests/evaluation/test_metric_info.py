from __future__ import annotations

import dataclasses
import json
import math

import pytest

from turbogr.evaluation.metric_info import MetricInfo, most_informative, one_per_family
from turbogr.evaluation.metrics import describe_metric, describe_metrics

LOSS = MetricInfo("log_loss", "Log loss", higher_is_better=False)
RETRIEVAL = describe_metrics(["hr@10", "ndcg@10", "hr@1", "ndcg@1", "hr@200", "mrr"])


def names(metrics: list[MetricInfo]) -> list[str]:
    return [metric.name for metric in metrics]


def test_better_follows_the_direction() -> None:
    assert LOSS.is_better(0.4, 0.5)
    assert not LOSS.is_better(0.5, 0.4)
    assert describe_metric("mrr").is_better(0.5, 0.4)
    for metric in (LOSS, describe_metric("mrr")):
        assert not metric.is_better(0.5, 0.5)
        assert not metric.is_better(math.nan, 0.5)


def test_the_best_is_the_first_of_the_finite_ones() -> None:
    values = [math.nan, 0.5, 0.3, 0.7, 0.3, math.inf, 0.7]
    assert LOSS.best(values) == 2
    assert describe_metric("mrr").best(values) == 3
    assert LOSS.best([]) is LOSS.best([math.nan]) is None


def test_a_description_survives_json() -> None:
    for metric in (LOSS, *RETRIEVAL):
        assert MetricInfo.read(json.loads(json.dumps(dataclasses.asdict(metric)))) == metric
    later = {**dataclasses.asdict(LOSS), "added_by_a_later_release": 1}
    assert MetricInfo.read(later) == LOSS


@pytest.mark.parametrize("content", [None, [], "x", {}, {"name": "x"}, {"name": 1, "title": "x"}])
def test_what_is_not_a_description_is_none(content: object) -> None:
    assert MetricInfo.read(content) is None
    assert MetricInfo.read({"name": "x", "title": "x", "higher_is_better": "no"}) is None
    assert MetricInfo.read({"name": "x", "title": "x", "format": "roman"}) is None


def test_one_metric_stands_for_its_family() -> None:
    assert names(one_per_family([*RETRIEVAL, LOSS])) == ["hr@10", "ndcg@10", "mrr", "log_loss"]
    assert names(one_per_family(describe_metrics(["hr@5", "hr@3", "ndcg@5", "ndcg@3"]))) == ["hr@3", "ndcg@3"]


def test_few_metrics_are_chosen_for_a_small_chart() -> None:
    assert names(most_informative(RETRIEVAL, 5)) == ["hr@1", "hr@10", "hr@200", "ndcg@10", "mrr"]
    assert names(most_informative(RETRIEVAL, 4)) == ["hr@1", "hr@10", "hr@200", "ndcg@10"]
    assert names(most_informative(RETRIEVAL, 4, "mrr")) == ["hr@1", "hr@10", "hr@200", "mrr"]
    assert names(most_informative(RETRIEVAL, 9, "ndcg@1")) == ["hr@1", "hr@10", "hr@200", "ndcg@1", "ndcg@10", "mrr"]
    assert most_informative([], 5) == []
