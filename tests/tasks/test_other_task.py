"""Training, evaluation, sweep and report of a run whose task is not retrieval and whose metric should be low."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.stores import draw_histories, write_store
from tests.tasks import click_task
from turbogr import api, cli, machine
from turbogr.config import load_config
from turbogr.report.page import write_report
from turbogr.runs import MetricLog, RunFolder, open_run
from turbogr.sweep import cells_of, compare
from turbogr.training.run import _model_title, _say_what_starts, train
from turbogr.training.trainer import Trainer

RECIPE = """
task: clicks
model: {name: sasrec, dim: 8, num_blocks: 1, num_heads: 1, max_len: 16}
loss: {num_negatives: 4}
data: {batch_size: 16, split: leave-two-out}
evaluate: {every: 1}
train: {epochs: 3, seed: 0, tensorboard: false, profile: false}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    write_store(tmp_path / "data", draw_histories(0, 40, 20, shortest=4), 20)
    (tmp_path / "clicks.yaml").write_text(RECIPE)
    result = train(load_config(tmp_path / "clicks.yaml"), tmp_path / "data", tmp_path / "out" / "clicks")
    assert result.best_value == 0.4
    return tmp_path / "out" / "clicks"


def test_the_checkpoint_with_the_lowest_loss_is_the_best(run: Path) -> None:
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    losses = {record["step"]: record["log_loss"] for record in MetricLog.read(run).evaluations}
    assert (best["epoch"], best["value"], losses[best["step"]]) == (2.0, 0.4, 0.4)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metrics"] == {"log_loss": 0.41, "auc": 1 - 0.41}
    assert (summary["step"], summary["task"]) == (best["step"], "clicks")


def test_a_model_without_blocks_is_named_after_its_task(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_run(run)
    trainer = Trainer(opened.config, opened.store, run, device=torch.device("cpu"), peak_flops=None)
    _say_what_starts(trainer, [], "")
    assert capsys.readouterr().err.startswith("sasrec: 1 blocks of width 8, up to 16 events; ")
    trainer.task.model = torch.nn.Linear(3, 2)
    assert (trainer.task.model_name(opened.config), _model_title(trainer.task, opened.config)) == ("clicks", "clicks")
    _say_what_starts(trainer, [], "")
    assert capsys.readouterr().err.startswith("clicks: 8 dense parameters, 160 in the item table\n")


def test_training_ends_early_when_the_loss_does_not_fall(tmp_path: Path, run: Path) -> None:
    config = load_config(tmp_path / "clicks.yaml", ["evaluate.patience=1", "train.epochs=9"])
    result = train(config, tmp_path / "data", tmp_path / "early")
    assert (result.status, result.best_value) == ("stopped early", 0.4)


def test_the_run_has_the_descriptions_of_its_metrics(run: Path) -> None:
    described = RunFolder.open(run).describe_metrics(["auc", "log_loss"])
    assert described == click_task.METRICS


def test_evaluate_measures_by_the_task(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(run)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["sasrec", "rate"]
    assert printed[1].split() == ["log_loss", "0.4100", "0.5500", "lower", "is", "better"]
    assert printed[2].split() == ["auc", "0.5900", "0.5000"]
    record = json.loads((run / "evaluation.json").read_text())
    assert record["parts"] == {
        "test": {"model": {"log_loss": 0.41, "auc": 1 - 0.41}, "rate": {"log_loss": 0.55, "auc": 0.5}}
    }
    assert record["rule"] == {"threshold": 4}
    assert not (run / "samples.json").exists()
    assert api.evaluate(run).metrics == record["parts"]["test"]["model"]
    assert cli.main(["evaluate", str(run), "--part", "valid"]) == 0
    assert list(json.loads((run / "evaluation.json").read_text())["parts"]) == ["test", "valid"]


@pytest.mark.parametrize("option", ["--batch-size", "--filter-last"])
def test_options_of_retrieval_are_refused(run: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(run), option, "8"]) == 2
    assert f"{option} is for runs of the task 'retrieval', and this is one of 'clicks'" in capsys.readouterr().err


def test_a_run_that_does_not_recommend_says_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recommend", str(run), "--out", str(tmp_path / "lists.csv")]) == 2
    assert "is a run of the task 'clicks', which does not recommend items" in capsys.readouterr().err


def test_the_report_and_the_sweep_show_the_lowest_loss_as_the_best(run: Path, tmp_path: Path) -> None:
    page = write_report(run).read_text()
    assert "reaches Log loss" in page and "best Log loss, epoch 2" in page
    assert "Recommendations" in page, "the run was not evaluated at its end, so examples may come"
    comparison = compare(cells_of([tmp_path / "clicks.yaml"], []), tmp_path / "out")
    assert comparison is not None
    rows = [dict(zip(comparison.table().columns, row, strict=True)) for row in comparison.table().rows]
    assert [(row["recipe"], row["best epoch"], row["Log loss"], row["AUC"]) for row in rows] == [
        ("clicks", "2", "0.4100", "0.5900"),
        ("rate", "-", "0.5500", "0.5000"),
    ]
