"""A small store with features of every kind and actions that follow from them, and a ranking config for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tests.stores import write_store
from turbogr.config import (
    Config,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimizerConfig,
    RankingConfig,
    RankingTarget,
    TableConfig,
    TrainConfig,
)
from turbogr.data.feature_columns import FeatureColumn, FeatureInfo
from turbogr.data.store import Store
from turbogr.data.vocabulary import Vocabulary
from turbogr.layers.stu import STUConfig

NUM_ITEMS, NUM_USERS = 40, 60
TASKS = {"click": RankingTarget(), "stay": RankingTarget("watch", kind="regression", weight=0.5)}


def write_ranking_store(path: Path, *, num_users: int = NUM_USERS, longest: int = 24, seed: int = 0) -> Store:
    """Users click items of the tag that they have clicked before; some actions and features are missing."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, num_users)
    total = int(lengths.sum())
    users, items = np.repeat(np.arange(num_users), lengths), random.integers(0, NUM_ITEMS, total)
    times = [np.cumsum(random.integers(0, 3, n)) * 60 + 1_650_000_000 for n in lengths]
    tags = random.integers(0, 4, NUM_ITEMS)
    liked = random.integers(0, 4, num_users)
    clicks = (random.random(total) < np.where(tags[items] == liked[users], 0.9, 0.2)).astype(np.int8)
    watch = np.where(clicks > 0, 30 + 3 * tags[items], 2).astype(np.float32)
    watch[::11] = np.nan
    tag_counts = random.integers(0, 3, NUM_ITEMS)
    vectors = np.eye(4, dtype=np.float32)[tags] + 0.1 * random.standard_normal((NUM_ITEMS, 4)).astype(np.float32)
    vectors[3] = np.nan
    features = [
        _category("event.tab", random.integers(-1, 3, total), 3),
        _category("event.device", random.integers(0, 2, total), 2),
        _category("item.author", tags, 4),
        FeatureColumn(
            "item.tag",
            FeatureInfo("categories", size=5),
            random.integers(0, 5, int(tag_counts.sum())).astype(np.int32),
            np.concatenate([[0], np.cumsum(tag_counts)]).astype(np.int64),
            _vocabulary(5),
        ),
        FeatureColumn("item.length", _number(), random.random(NUM_ITEMS).astype(np.float32)),
        FeatureColumn("item.text", FeatureInfo("vector", size=4), vectors.reshape(-1)),
        _category("user.city", random.integers(0, 3, num_users), 3),
        _category("user.age", random.integers(0, 4, num_users), 4),
        FeatureColumn("user.since", _number(), random.random(num_users).astype(np.float32)),
        FeatureColumn("action.click", FeatureInfo("binary", mean=float(clicks.mean())), clicks),
        FeatureColumn("action.watch", dataclasses.replace(_number(), low=2, high=60), watch),
    ]
    cuts = [1_650_000_000 + 60 * 12, 1_650_000_000 + 60 * 16]
    histories = np.split(items, np.cumsum(lengths)[:-1])
    return write_store(
        path,
        [history.tolist() for history in histories],
        NUM_ITEMS,
        times=[own.tolist() for own in times],
        split=f"time:{cuts[0]},{cuts[1]}",
        features=features,
    )


def _vocabulary(size: int) -> Vocabulary:
    return Vocabulary(pa.array([f"value-{number}" for number in range(size)], pa.large_string()))


def _category(key: str, values: NDArray[Any], size: int) -> FeatureColumn:
    return FeatureColumn(key, FeatureInfo("category", size=size), values.astype(np.int32), None, _vocabulary(size))


def _number() -> FeatureInfo:
    return FeatureInfo("number", mean=0.5, std=0.3, low=0.0, high=1.0)


def ranking_config(**changes: Any) -> Config:
    """Eight tables: items, users, tab, device, author, tag, city and age, two of them of another width or optimiser."""
    tables = {"tag": TableConfig(dim=6), "city": TableConfig(optimizer="adagrad", lr=0.05)}
    return Config(
        task="ranking",
        model=ModelConfig(name="stu", dim=16, num_blocks=2, num_heads=2, max_len=16, dropout=0.1),
        options={"ranking": RankingConfig(TASKS, **changes), "stu": STUConfig(time_bias=True)},
        tables=tables,
        optimizer=OptimizerConfig(lr=5e-3),
        data=DataConfig(batch_size=16),
        evaluate=EvaluateConfig(baselines=()),
        train=TrainConfig(epochs=2, log_every=3, tensorboard=False),
    )
