"""Which events a ranking task is measured on, and what the result says."""

import json
import warnings
from dataclasses import dataclass

import numpy as np
import pytest

from tests.stores import write_store
from turbogr.data.feature_columns import FeatureColumn, FeatureInfo
from turbogr.data.split import Split
from turbogr.errors import UserError
from turbogr.evaluation import action_metrics
from turbogr.evaluation.action_evaluation import (
    HeldOutActions,
    action_metric_names,
    describe_action_metrics,
    measure_actions,
)
from turbogr.evaluation.metric_info import MetricInfo, one_per_family

CLICKS = [[0, 1, 1, 0], [1, 0, 0], [1, 1], [0, np.nan, 1, 1, 0]]
TIMES = [[10, 30, 110, 120], [20, 90, 99], [150, 160], [50, 101, 102, 103, 130]]
HISTORIES = [[0, 1, 2, 3], [1, 2, 3], [0, 1], [4, 3, 2, 1, 0]]


@dataclass(frozen=True)
class Wanted:
    action: str | None = None
    kind: str = "binary"


TARGETS = {"is_click": Wanted(), "seconds": Wanted("play", "regression")}


@pytest.fixture
def store(tmp_path):
    clicks = np.concatenate(CLICKS).astype(np.float32)
    info = FeatureInfo("binary", low=0, high=1, mean=0.5)
    play = np.arange(len(clicks), dtype=np.float32)
    features = [
        FeatureColumn("action.is_click", info, clicks),
        FeatureColumn("action.play", FeatureInfo("number", low=0, high=13), play),
    ]
    return write_store(tmp_path / "store", HISTORIES, 5, times=TIMES, split="time:40,100", features=features)


def test_all_events_of_a_part_are_measured_new_users_too(store):
    held_out = HeldOutActions.of(store, Split.of(store), "test", TARGETS)
    assert held_out.events.tolist() == [2, 3, 7, 8, 10, 11, 12, 13]
    assert held_out.users.tolist() == [0, 0, 2, 2, 3, 3, 3, 3]
    np.testing.assert_array_equal(held_out.labels["is_click"], [1, 0, 1, 1, np.nan, 1, 1, 0])
    assert held_out.labels["seconds"].tolist() == [2, 3, 7, 8, 10, 11, 12, 13]
    assert held_out.skipped == {"no test event": 1} and held_out.num_users == 3
    assert "all 8 events of 3 users from 1970-01-01" in held_out.protocol
    assert HeldOutActions.of(store, Split.of(store), "valid", TARGETS).events.tolist() == [5, 6, 9]


def test_the_result_is_that_of_the_known_events(store):
    held_out = HeldOutActions.of(store, Split.of(store), "test", TARGETS)
    p = np.array([0.9, 0.2, 0.7, 0.6, 0.5, 0.1, 0.8, 0.8])
    result = measure_actions(held_out, {"is_click": p, "seconds": p * 10})
    known = [0, 1, 2, 3, 5, 6, 7]
    labels, users = held_out.labels["is_click"][known], held_out.users[known]
    assert list(result.metrics) == action_metric_names(TARGETS)
    assert result.metrics["auc/is_click"] == action_metrics.auc(labels, p[known]).value
    assert result.metrics["gauc/is_click"] == action_metrics.gauc(labels, p[known], users).gauc.value
    assert result.metrics["calibration/is_click"] == pytest.approx(p[known].sum() / 5)
    assert result.metrics["mae/seconds"] == pytest.approx(np.abs(held_out.labels["seconds"] - 10 * p).mean())
    about = result.details["is_click"]
    assert (about["num_events"], about["num_unknown"], about["num_positive"]) == (7, 1, 5)
    assert about["one_class_users"] == 1 and about["gauc_users"] == 2
    assert set(result.standard_errors) == set(result.metrics)
    assert json.loads(json.dumps(result.details))["is_click"]["roc"][0] == [0, 0]


def test_a_single_class_is_said_and_its_metrics_are_left_out(store):
    held_out = HeldOutActions.of(store, Split.of(store), "valid", {"is_click": Wanted()})
    with pytest.warns(UserWarning, match="'is_click' has no AUC, GAUC, normalised entropy.* all 3 events are negative"):
        result = measure_actions(held_out, {"is_click": np.full(3, 0.2)})
    assert list(result.metrics) == ["log_loss/is_click"]
    assert "all 3 events are negative" in result.details["is_click"]["undefined"]["auc"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_actions(held_out, {"is_click": np.full(3, 0.2)}, warn=False)


@pytest.mark.parametrize("wrong", [np.nan, 1.5, -0.1, np.inf])
def test_a_prediction_that_is_no_probability_is_refused(store, wrong):
    held_out = HeldOutActions.of(store, Split.of(store), "valid", {"is_click": Wanted()})
    with pytest.raises(UserError, match=r"a prediction of 'is_click' is .* not a probability"):
        measure_actions(held_out, {"is_click": np.array([0.1, wrong, 0.2])})


def test_an_unknown_action_and_an_empty_part_are_refused(store):
    with pytest.raises(
        UserError, match=r"no action 'is_clik'; its actions are is_click, play.*Did you mean 'is_click'"
    ):
        HeldOutActions.of(store, Split.of(store), "test", {"is_clik": Wanted()})
    with pytest.raises(UserError, match="has no test event; choose cuts within the log's times"):
        HeldOutActions.of(store, Split.of(store, "time:500"), "test", TARGETS)


def test_descriptions_go_by_metric_and_calibration_is_best_at_one():
    found = describe_action_metrics(action_metric_names({**TARGETS, "like": Wanted()}))
    assert [info.name for info in found][:3] == ["auc/is_click", "auc/like", "gauc/is_click"]
    assert one_per_family(found)[0].name == "auc/is_click"
    by_name = {info.name: info for info in found}
    assert not by_name["ne/like"].higher_is_better and not by_name["mae/seconds"].higher_is_better
    calibration = by_name["calibration/like"]
    assert calibration.is_better(1.05, 0.9) and calibration.is_better(0.9, 1.2) and not calibration.is_better(2, 0.5)
    assert calibration.best([0.5, 1.1, 0.0]) == 1 and calibration.direction == "1 is best"
    assert not calibration.is_better(float("nan"), 0.5)
    assert MetricInfo.read(json.loads(json.dumps(calibration.__dict__))) == calibration
