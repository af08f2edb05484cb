"""The report of a run whose task is not retrieval: metrics with other names, of which one should be low."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import yaml

from tests.report.test_page import change, report
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.report.page import write_report

LOSS = MetricInfo("log_loss", "Log loss", higher_is_better=False, unit="nats")
AUC = MetricInfo("auc", "AUC", format="share", sentence="orders {value} of the pairs correctly")


def write_evaluations(run, losses, aucs):
    records = [
        {"kind": "eval", "part": "valid", "step": 10 * epoch, "epoch": epoch, "log_loss": loss, "auc": auc}
        for epoch, (loss, auc) in enumerate(zip(losses, aucs, strict=True), start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def ranking_run(run_folder):
    change(run_folder / "run.json", metrics=[dataclasses.asdict(metric) for metric in (LOSS, AUC)])
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config["evaluate"]["metric"] = "log_loss"
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_evaluations(run_folder, [0.60, 0.44, 0.52], [0.70, 0.75, 0.80])
    systems = {"model": {"auc": 0.81, "log_loss": 0.44}, "rate": {"auc": 0.5, "log_loss": 0.55}}
    change(run_folder / "evaluation.json", parts={"test": systems})
    (run_folder / "samples.json").unlink()
    return run_folder


def test_the_first_metric_is_the_headline(ranking_run):
    text = report(ranking_run).text
    assert "HSTU reaches Log loss 0.44" in text
    assert "0.80× rate (0.55)" in text
    assert "does not beat" not in text
    assert "HR@10" not in text


def test_a_higher_loss_does_not_beat_the_baseline(ranking_run):
    systems = {"model": {"log_loss": 0.56}, "rate": {"log_loss": 0.55}}
    change(ranking_run / "evaluation.json", parts={"test": systems})
    assert "The model does not beat rate by Log loss." in report(ranking_run).text


def test_a_sentence_of_the_description_is_the_headline(ranking_run):
    change(ranking_run / "run.json", metrics=[dataclasses.asdict(metric) for metric in (AUC, LOSS)])
    text = report(ranking_run).text
    assert "HSTU orders 81.0 % of the pairs correctly" in text
    assert "1.6× rate (50.0 %)" in text


def test_the_table_marks_the_lowest_loss(ranking_run):
    html = re.sub(r"\s+", " ", write_report(ranking_run).read_text())
    assert "Log loss <small>lower is better</small>" in html
    assert '<td class="best">0.4400</td>' in html
    assert '<td class="best">0.8100</td>' in html
    assert '<td class="best">0.55' not in html


def test_the_best_epoch_has_the_lowest_loss(ranking_run):
    text = report(ranking_run).text
    assert "best Log loss, epoch 2" in text
    assert "Lowest Log loss: 0.4400 at epoch 2." in text
    assert "Lower is better." in text


def test_metrics_of_another_scale_have_a_figure_of_their_own(ranking_run):
    text = report(ranking_run).text
    assert "Validation metrics: Log loss" in text
    assert "Validation metrics: AUC" in text


def test_the_latest_evaluation_shows_the_headline_metric(ranking_run):
    (ranking_run / "evaluation.json").unlink()
    assert "Log loss on the validation items was 0.52 at step 30." in report(ranking_run).text


def test_without_descriptions_the_names_are_shown(ranking_run):
    change(ranking_run / "run.json", metrics=None)
    text = report(ranking_run).text
    assert "log_loss" in text
    assert "auc" in text
