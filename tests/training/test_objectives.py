"""Every way to draw and score negatives trains on, whatever runs early or is interrupted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_run import assert_same_end, final_tensors, stop_after
from turbogr.config import Config, LossConfig, PipelineConfig
from turbogr.data.store import Store
from turbogr.training.run import train

OBJECTIVES: dict[str, dict[str, Any]] = {
    "hard": {"sampler": "mixture", "shares": (0.5, 0.0, 0.0, 0.5), "hard_size": 3, "hard_every": 4},
    "everything": {
        "sampler": "mixture",
        "shares": (0.25, 0.25, 0.25, 0.25),
        "hard_every": 4,
        "expansion": 2,
        "precision": "fp16",
        "segment_mb": 0.001,
    },
    "positions": {"sampler": "in-batch", "expansion": 3, "sharing": "positions", "precision": "int8"},
    "logits": {"sampler": "popularity", "expansion": 2, "sharing": "logits", "precision": "fp16"},
}


@pytest.fixture(params=list(OBJECTIVES))
def objective_config(request: pytest.FixtureRequest, config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Hard negatives come into use soon enough for a short run."""
    for module in ("turbogr.config.schema", "turbogr.negatives.hard"):
        monkeypatch.setattr(f"{module}.HARD_DELAY", 4)
    loss = LossConfig(num_negatives=8, **OBJECTIVES[request.param])
    return dataclasses.replace(config, loss=loss, train=dataclasses.replace(config.train, epochs=2))


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_stopping_and_resuming_changes_nothing(
    steps: int, objective_config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(objective_config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        assert train(objective_config, store.path, tmp_path / "stopped").status == "interrupted"
    assert train(objective_config, store.path, tmp_path / "stopped", resume=True).status == "finished"
    assert_same_end(objective_config, store, tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("mode", ["sync", "exact_overlap"])
def test_what_runs_early_draws_the_same(mode: Any, objective_config: Config, store: Store, tmp_path: Path) -> None:
    pipelined = dataclasses.replace(objective_config, pipeline=PipelineConfig(mode=mode, depth=2))
    for name, config in (("serial", objective_config), ("early", pipelined)):
        train(config, store.path, tmp_path / name)
    serial = final_tensors(objective_config, store, tmp_path / "serial")
    early = final_tensors(pipelined, store, tmp_path / "early")
    for name, tensor in serial.items():
        assert tensor.equal(early[name]), name


def test_hard_lists_matter(config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists in a checkpoint are those of the trained table, not the random ones of the beginning."""
    for module in ("turbogr.config.schema", "turbogr.negatives.hard"):
        monkeypatch.setattr(f"{module}.HARD_DELAY", 4)
    ends = []
    for every in (4, 10_000):
        loss = LossConfig(num_negatives=8, **{**OBJECTIVES["hard"], "hard_every": every})
        changed = dataclasses.replace(config, loss=loss)
        train(changed, store.path, tmp_path / str(every))
        ends.append(final_tensors(changed, store, tmp_path / str(every)))
    assert int(ends[0]["task.newest"]) > 0 and int(ends[1]["task.newest"]) == 0
    assert not ends[0]["tables.item.weight"].equal(ends[1]["tables.item.weight"])
