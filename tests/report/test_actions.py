"""The report's section about predicted actions."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.report.test_page import change, report
from turbogr.evaluation.action_evaluation import describe_action_metrics

NAMES = ["auc/click", "gauc/click", "calibration/click", "mae/stay"]
ROC = [[0.0, 0.0], [0.2, 0.7], [1.0, 1.0]]
BINS = [[40, 0.1, 0.12, 0.02], [40, 0.5, 0.45, None], [20, 0.9, 0.95, 0.01]]


def details(**changes):
    click = {"kind": "binary", "num_events": 100, "num_positive": 40, "num_unknown": 3, "gauc_users": 8}
    click |= {"one_class_users": 2, "roc": ROC, "calibration": BINS}
    stay = {"kind": "regression", "num_events": 90, "mean": 12.5, "num_unknown": 0, "calibration": []}
    return {"click": {**click, **changes}, "stay": stay}


@pytest.fixture
def run_with_actions(run_folder):
    change(run_folder / "run.json", metrics=[dataclasses.asdict(info) for info in describe_action_metrics(NAMES)])
    systems = {
        "model": {"auc/click": 0.81, "gauc/click": 0.7, "calibration/click": 0.9, "mae/stay": 3.0},
        "lightgbm": {"auc/click": 0.79, "gauc/click": 0.72, "calibration/click": 1.02, "mae/stay": 3.5},
    }
    shown = {"model": details(), "lightgbm": details()}
    change(run_folder / "evaluation.json", parts={"test": systems}, details={"test": shown})
    (run_folder / "samples.json").unlink()
    return run_folder


def test_every_task_has_its_table_roc_and_calibration(run_with_actions):
    text = report(run_with_actions).text
    assert "Predicted actions" in text and "click on the test events" in text and "stay on the test events" in text
    assert "100 events, 40.0 % of them positive; GAUC is of the 8 users who have events of both classes" in text
    assert "of 3 more it is not known what happened" in text
    assert "ROC of click" in text and "Calibration of click" in text and "ROC of stay" not in text
    assert "90 events, of mean 12.5" in text
    assert "AUC of click on the test events" in text and "no sample users" not in text


def test_the_table_of_a_task_marks_the_best_of_each_metric(run_with_actions):
    html = " ".join((run_with_actions / "report.html").read_text().split()) if report(run_with_actions) else ""
    table = html[html.index("<caption>click on the test events") :]
    table = table[: table.index("</table>")]
    assert '<td class="best">0.8100</td>' in table and '<td class="best">0.7200</td>' in table
    assert '<td class="best">1.0200</td>' in table, "calibration is best at 1"


def test_a_summary_without_an_evaluation_has_the_section_too(run_with_actions):
    evaluation = json.loads((run_with_actions / "evaluation.json").read_text())
    (run_with_actions / "evaluation.json").unlink()
    summary = {"part": "test", "step": evaluation["step"], "metrics": evaluation["parts"]["test"]["model"]}
    summary |= {"baselines": {}, "protocol": {"text": "all events"}, "details": {"model": details()}}
    (run_with_actions / "summary.json").write_text(json.dumps(summary))
    assert "ROC of click" in report(run_with_actions).text


@pytest.mark.parametrize(
    "damaged", [{"roc": "none"}, {"roc": [[0, "x"]]}, {"calibration": [[1, 2]]}, {"num_events": None}, {"undefined": 3}]
)
def test_damaged_details_leave_the_rest_of_the_page(damaged, run_with_actions):
    change(run_with_actions / "evaluation.json", details={"test": {"model": details(**damaged), "lightgbm": 5}})
    assert "Predicted actions" in report(run_with_actions).text


def test_an_undefined_metric_says_why(run_with_actions):
    about = details(undefined={"auc": "all 100 events are positive"}, roc=[])
    change(run_with_actions / "evaluation.json", details={"test": {"model": about}})
    assert "auc is not defined: all 100 events are positive." in report(run_with_actions).text
