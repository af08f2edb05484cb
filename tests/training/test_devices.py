"""Runs on an accelerator, which is simulated: what they compute there, and what they ask of the host."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulated_device import ASKED, DEVICE, OnDevice, SimulatedDevice, simulate
from tests.training.test_pipeline import MODES, sparse, train_epochs, trainer_of, weights, with_pipeline
from turbogr import ops
from turbogr.config import Config, LossConfig, ModelConfig
from turbogr.data.store import Store
from turbogr.evaluation import scorer
from turbogr.evaluation.scorer import ModelScorer
from turbogr.models.golden import Golden, write_golden
from turbogr.recommend import Recommender
from turbogr.runs import load_model, open_run
from turbogr.training.run import resolve_against, train
from turbogr.training.trainer import Trainer


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    simulate(monkeypatch)
    with ops.backend("reference"):
        yield


def test_a_run_trains_is_measured_and_recommends_on_its_device(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = dataclasses.replace(config.train, epochs=1, backend="reference")
    config = dataclasses.replace(config, train=short)
    assert train(config, store.path, tmp_path / "cpu").status == "finished"
    encoded: list[bool] = []
    encode = ModelScorer.encode

    def watched(*args: object) -> torch.Tensor:
        vectors = encode(*args)  # type: ignore[arg-type]
        encoded.append(isinstance(vectors, OnDevice))
        return vectors

    monkeypatch.setattr(scorer.ModelScorer, "encode", watched)
    monkeypatch.setattr("turbogr.training.run.choose_device", lambda *args: DEVICE)
    with SimulatedDevice():
        assert train(config, store.path, tmp_path / "device").status == "finished"
        assert encoded and all(encoded), "the last measurement and the samples are computed there too"
    wanted, found = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("cpu", "device"))
    assert found["metrics"] == pytest.approx(wanted["metrics"], abs=0.02)
    lists = []
    for device in (torch.device("cpu"), DEVICE):
        with SimulatedDevice():
            opened = open_run(tmp_path / "device", device=device)
            assert all(isinstance(table, OnDevice) == (device == DEVICE) for table in opened.tables.values())
            assert load_model(tmp_path / "device", device=device).tables.keys() == opened.tables.keys()
            recommender = Recommender(opened.recommender, store, opened.split, opened=opened)
            lists.append(recommender.recommend(k=5))
    assert lists[0].iloc[:, 1].tolist() == lists[1].iloc[:, 1].tolist()
    assert lists[0]["score"].tolist() == pytest.approx(lists[1]["score"].tolist(), abs=1e-5)


def test_a_golden_file_is_compared_on_the_device(tmp_path: Path) -> None:
    config = ModelConfig(name="hstu", dim=8, num_blocks=1, num_heads=2, max_len=6, dropout=0.0)
    write_golden(tmp_path / "golden.npz", config, num_items=9, num_sequences=3)
    golden = Golden.read(tmp_path / "golden.npz")
    with SimulatedDevice():
        assert max(row.error for row in golden.compare(device=DEVICE)) < 1e-5


@pytest.mark.parametrize("mode", ["serial", "sync", "semi_async", "exact_overlap"])
@pytest.mark.parametrize("loss", [{}, {"expansion": 2, "sampler": "popularity"}], ids=["plain", "groups"])
def test_a_step_asks_the_device_once(
    mode: str, loss: dict[str, Any], config: Config, store: Store, tmp_path: Path
) -> None:
    data = dataclasses.replace(config.data, batch_size=12)
    config = dataclasses.replace(sparse(config), loss=LossConfig(num_negatives=4, **loss), data=data)
    config = with_pipeline(config, **MODES[mode])
    wanted = trainer_of(config, store, tmp_path / "cpu")
    train_epochs(wanted, 1)
    with SimulatedDevice():
        trainer = Trainer(resolve_against(config, store), store, tmp_path / "device", device=DEVICE, peak_flops=None)
        ASKED.clear()
        trained = train_epochs(trainer, 1)
        asked = list(ASKED)
    repeated = {what: times for what, times in Counter(asked).items() if times > 1}
    assert repeated == {"copy to the host: agree (training/step.py)": len(trained)}, "the loss and the norms, together"
    for ours, theirs in zip(weights(trainer), weights(wanted), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
