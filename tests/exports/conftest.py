"""Runs that take a second, for exporting them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import draw_histories, write_store
from turbogr import machine
from turbogr.config import (
    Config,
    DataConfig,
    DeliverConfig,
    EvaluateConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from turbogr.data.store import Store
from turbogr.simple.delivery import MODEL, Component, Delivered
from turbogr.training.run import train

NUM_ITEMS = 60


@pytest.fixture(scope="package", autouse=True)
def _no_peak_measurement():
    patch = pytest.MonkeyPatch()
    patch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    yield
    patch.undo()


def config(**changes: Any) -> Config:
    """The config of a run of a small HSTU."""
    base = Config(
        model=ModelConfig(name="hstu", dim=16, max_len=8, num_blocks=2, num_heads=2, qk_dim=8, v_dim=8),
        loss=LossConfig(num_negatives=8),
        optimizer=OptimizerConfig(warmup_steps=2),
        data=DataConfig(batch_size=32),
        deliver=DeliverConfig(choose="model"),
        evaluate=EvaluateConfig(every=1, patience=None, baselines=("popularity",)),
        train=TrainConfig(epochs=1, tensorboard=False),
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A log with real times, in which users come back to items, and with an item that nobody had."""
    histories = draw_histories(4, 160, NUM_ITEMS - 1, shortest=3, longest=20)
    generator = np.random.default_rng(8)
    times = [np.sort(generator.integers(10**9, 10**9 + 10**7, len(row))).tolist() for row in histories]
    return write_store(tmp_path_factory.mktemp("export") / "data", histories, NUM_ITEMS, times=times)


@pytest.fixture(scope="package")
def run(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that delivers its model."""
    folder = tmp_path_factory.mktemp("export-run") / "run"
    train(config(), store.path, folder)
    return folder


BLEND = (
    Component(MODEL, 2.0, 0.4),
    Component("ease", 1.5, 0.3, {"popularity_weight": 0.02, "l2": 20.0}, 0.05),
    Component("session-knn", 1.0, 0.2, {"decay": 0.7, "neighbours": 5.0, "popularity_weight": 0.1}, 0.2),
    Component("skip-markov", 0.5, 0.1, {"decay": 0.7, "virtual": 3.0, "backward": 0.5}, 0.01),
)


@pytest.fixture
def delivering(run: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of the run that delivers other components."""
    import shutil

    def make(*components: Component) -> Path:
        copy = tmp_path / "delivering"
        shutil.copytree(run, copy)
        Delivered("a sum", components).write(copy)
        return copy

    return make
