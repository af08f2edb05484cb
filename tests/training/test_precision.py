"""Training in bf16: what is stored, resuming, and where the precision is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.training.test_run import assert_same_end, final_tensors, stop_after
from turbogr.cli import main
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import Note
from turbogr.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:train.precision=bf16")


@pytest.fixture
def config(config: Config) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2, precision="bf16"))


def test_a_stopped_run_resumes_to_the_same_bits_with_masters_in_fp32(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(Note, match="bf16 stores activations in bf16"):
        train(config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        train(config, store.path, tmp_path / "stopped")
    train(config, store.path, tmp_path / "stopped", resume=True)
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")
    tensors = final_tensors(config, store, tmp_path / "straight")
    assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {torch.float32}


def test_evaluate_and_recommend_tell_the_precision(
    config: Config, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=1)), store.path, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "the model computes in bf16" in capsys.readouterr().out
    out = tmp_path / "recommendations.csv"
    assert main(["recommend", str(tmp_path / "run"), "--k", "3", "--out", str(out)]) == 0
    assert "(the model computes in bf16)" in capsys.readouterr().err
