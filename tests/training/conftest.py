"""A small store in which the next item follows from the last two, and a config that learns it in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from turbogr import machine
from turbogr.config import Config, DataConfig, EvaluateConfig, LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from turbogr.data.store import Manifest, Store
from turbogr.data.store_writer import StoreWriter

NUM_ITEMS = 40


def write_store(
    path: Path,
    *,
    num_users: int = 60,
    num_items: int = NUM_ITEMS,
    seed: int = 0,
    split: str = "leave-two-out",
    actions: Mapping[str, Callable[[NDArray[np.int64]], NDArray[Any]]] | None = None,
) -> Store:
    """Items beyond the first NUM_ITEMS are in the catalogue and in no history.

    `actions` are functions of the items [E] that give the columns of their names.
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 30, num_users)
    items = []
    for length in lengths:
        sequence = list(random.integers(0, NUM_ITEMS, 2))
        while len(sequence) < length:
            sequence.append((sequence[-1] + sequence[-2]) % NUM_ITEMS if random.random() < 0.9 else random.integers(40))
        items.extend(sequence)
    times = np.concatenate([np.cumsum(random.integers(1, 5000, length)) for length in lengths])
    with StoreWriter(path) as writer:
        writer.append("offsets", np.concatenate([[0], np.cumsum(lengths)]), np.int64)
        writer.append("items", np.array(items), np.int32)
        writer.append("times", times, np.int64)
        for name, column in (actions or {}).items():
            writer.append(f"action.{name}", column(np.array(items)))
        writer.write_vocabulary("user_ids", np.arange(num_users) + 1000)
        writer.write_vocabulary("item_ids", np.arange(num_items) + 5000)
        return writer.commit(
            Manifest(
                source="test",
                num_users=num_users,
                num_items=num_items,
                num_events=len(items),
                split=split,
                times="real",
                account={"rows_in": len(items), "rows_kept": len(items), "dropped": {}},
            )
        )


@pytest.fixture(autouse=True)
def _no_gemm_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_store(tmp_path / "store")


@pytest.fixture
def config() -> Config:
    return make_config()


def make_config() -> Config:
    return Config(
        model=ModelConfig(dim=16, num_blocks=1, num_heads=2, max_len=16, num_time_buckets=32, dropout=0.1),
        loss=LossConfig(num_negatives=8),
        optimizer=OptimizerConfig(lr=5e-3, warmup_steps=2, schedule="cosine", clip_norm=5.0),
        data=DataConfig(batch_size=16),
        evaluate=EvaluateConfig(ks=(1, 10), metric="hr@10", every=1, baselines=("popularity", "markov")),
        train=TrainConfig(epochs=3, log_every=3, tensorboard=False),
    )
