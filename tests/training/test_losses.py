"""Every built-in loss trains the same whatever runs early or is interrupted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_run import assert_same_end, final_tensors, stop_after
from turbogr.config import Config, LossConfig, PipelineConfig
from turbogr.data.store import Store
from turbogr.training.run import train

LOSSES = {
    "full-softmax": LossConfig(name="full-softmax"),
    "bce": LossConfig(name="bce", num_negatives=8, temperature=0.2),
    "gbce": LossConfig(name="gbce", num_negatives=8, temperature=0.2, sampler="in-batch"),
}


@pytest.fixture(params=list(LOSSES))
def loss_config(request: pytest.FixtureRequest, config: Config) -> Config:
    trained = dataclasses.replace(config.train, epochs=2)
    return dataclasses.replace(config, loss=LOSSES[request.param], train=trained)


def test_stopping_and_resuming_changes_nothing(
    loss_config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(loss_config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(loss_config, store.path, tmp_path / "stopped").status == "interrupted"
    assert train(loss_config, store.path, tmp_path / "stopped", resume=True).status == "finished"
    assert_same_end(loss_config, store, tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("mode", ["sync", "exact_overlap"])
def test_what_runs_early_changes_nothing(mode: Any, loss_config: Config, store: Store, tmp_path: Path) -> None:
    pipelined = dataclasses.replace(loss_config, pipeline=PipelineConfig(mode=mode, depth=2))
    for name, config in (("serial", loss_config), ("early", pipelined)):
        train(config, store.path, tmp_path / name)
    serial = final_tensors(loss_config, store, tmp_path / "serial")
    early = final_tensors(pipelined, store, tmp_path / "early")
    for name, tensor in serial.items():
        assert tensor.equal(early[name]), name


def test_stopping_and_resuming_planned_steps_changes_nothing(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataclasses.replace(config.data, batch_size=8, batch_tokens=None, plan_ranks=2, plan_window=3)
    planned = dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, epochs=2))
    train(planned, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(planned, store.path, tmp_path / "stopped").status == "interrupted"
    assert train(planned, store.path, tmp_path / "stopped", resume=True).status == "finished"
    assert_same_end(planned, store, tmp_path / "straight", tmp_path / "stopped")
