"""Metrics of plug-ins: computed beside the others, described by attributes, and good for choosing a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.test_commands import CONFIG
from tests.stores import draw_histories, write_store
from turbogr import cli, machine, plugins
from turbogr.config import Config, EvaluateConfig
from turbogr.errors import UserError
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.evaluation.metrics import MISSED, describe_metric, extra_metrics, ranking_metrics
from turbogr.runs import MetricLog, open_run
from turbogr.training.run import train


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric whose best value is the lowest, for the time of a test."""
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))

    @dataclasses.dataclass(frozen=True)
    class Options:
        cut: int = 100

    def mean_position(positions: Any, options: Options) -> Any:
        assert (np.diff(positions) >= 0).all()
        return np.minimum(positions, options.cut).mean()

    mean_position.higher_is_better = False  # type: ignore[attr-defined]
    mean_position.title = "Mean position"  # type: ignore[attr-defined]
    plugins.register("metric", "mean_position", config=Options)(mean_position)


def test_extra_metrics_are_computed_from_sorted_positions(registered: None) -> None:
    config = Config(evaluate=EvaluateConfig(metrics=("mean_position",)))
    extra = extra_metrics(config)
    assert ranking_metrics(np.array([7, 1, MISSED, 4]), (5,), extra)["mean_position"] == (7 + 1 + 100 + 4) / 4
    assert list(ranking_metrics(np.array([7]), (5,), extra)) == ["hr@5", "ndcg@5", "mrr", "mean_position"]


def test_a_metric_is_described_by_attributes_of_its_function(registered: None) -> None:
    assert describe_metric("mean_position") == MetricInfo("mean_position", "Mean position", higher_is_better=False)
    plugins.find("metric", "mean_position").factory.higher_is_better = "no"
    with pytest.raises(UserError, match=r"the metric 'mean_position' of .* has an attribute of a wrong type"):
        describe_metric("mean_position")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "high", [1, 2]])
def test_a_metric_that_returns_no_number_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"the metric 'odd' returned .*; it must return a finite number"):
        ranking_metrics(np.array([1]), (5,), {"odd": lambda positions: value})


def test_the_name_of_a_metric_that_is_measured_anyway_is_refused() -> None:
    with pytest.raises(UserError, match=r"evaluate\.metrics names 'mrr', which is measured anyway"):
        extra_metrics(Config(evaluate=EvaluateConfig(metrics=("mrr",))))


def test_a_run_is_selected_by_an_extra_metric(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    write_store(tmp_path / "data", draw_histories(1, 60, 50, shortest=4), 50)
    evaluate = EvaluateConfig(
        ks=(5,), metrics=("mean_position",), metric="mean_position", baselines=("popularity", "markov")
    )
    config = dataclasses.replace(CONFIG, evaluate=evaluate, train=dataclasses.replace(CONFIG.train, epochs=4))
    result = train(config, tmp_path / "data", tmp_path / "run")
    values = {record["step"]: record["mean_position"] for record in MetricLog.read(tmp_path / "run").evaluations}
    assert len(set(values.values())) > 1
    assert result.best_value == min(values.values()) == values[result.best_step]
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mean_position"))
    parts = json.loads((tmp_path / "run" / "evaluation.json").read_text())["parts"]["test"]
    systems = ("model", "popularity", "markov")
    assert line.split()[1:4] == [f"{parts[name]['mean_position']:.4f}" for name in systems]
    assert line.endswith("lower is better")
    assert open_run(tmp_path / "run").config.evaluate.metrics == ("mean_position",)
