"""Small stores written from lists, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.store import Manifest, Store
from turbogr.data.store_writer import StoreWriter


def write_store(
    path: Path,
    histories: Sequence[Sequence[int]],
    num_items: int,
    *,
    times: Sequence[Sequence[int]] | None = None,
    split: str = "leave-two-out",
    real_times: bool = True,
    features: Sequence[FeatureColumn] = (),
) -> Store:
    """Write a store whose user u has the item rows histories[u].

    Raw user ids are 100 + u, raw item ids "item-007"; without `times`, a user's events are a minute apart. Of
    `features`, actions have the key "action.NAME".
    """
    lengths = [len(history) for history in histories]
    if times is None:
        times = [[(60 if real_times else 1) * place for place in range(length)] for length in lengths]
    with StoreWriter(path) as writer:
        writer.append("offsets", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        writer.append("items", np.array([item for history in histories for item in history], np.int32))
        writer.append("times", np.array([time for row in times for time in row], np.int64))
        writer.write_vocabulary("user_ids", np.arange(100, 100 + len(histories), dtype=np.int64))
        writer.write_vocabulary("item_ids", pa.array([f"item-{row:03d}" for row in range(num_items)]))
        for feature in features:
            writer.write_feature(feature)
        manifest = Manifest(
            source="lists",
            num_users=len(histories),
            num_items=num_items,
            num_events=sum(lengths),
            split=split,
            times="real" if real_times else "positions",
            account={},
            features={feature.key: feature.info for feature in features},
        )
        return writer.commit(manifest)


def draw_histories(
    seed: int, num_users: int, num_items: int, *, shortest: int = 1, longest: int = 20
) -> list[list[int]]:
    """Draw histories with popular items, repeats, and an order that carries some signal."""
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(num_users):
        item = int(generator.integers(num_items))
        history = []
        for _ in range(int(generator.integers(shortest, longest + 1))):
            history.append(item)
            follows = generator.random() < 0.5
            item = (item + 1) % num_items if follows else int(num_items * generator.random() ** 3)
        drawn.append(history)
    return drawn
