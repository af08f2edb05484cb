"""Features as a store keeps them and as a batch carries them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.stores import write_store
from turbogr.data.batching import event_batch, history_batch
from turbogr.data.feature_columns import FeatureColumn, FeatureInfo
from turbogr.data.feature_values import select
from turbogr.data.loader import Loader
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.store_checksums import store_damages
from turbogr.data.vocabulary import Vocabulary
from turbogr.errors import UserError
from turbogr.jagged import Jagged

COLUMNS = {
    "tab": "event.tab", "genres": "item.genres", "year": "item.year", "content": "item.content", "age": "user.age",
    "click": "action.click",
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """User 0 has items 0, 1, 2 and user 1 has items 2, 0."""
    genres = Vocabulary(pa.array(["a", "b", "c"], pa.large_string()))
    features = [
        FeatureColumn(
            "event.tab", FeatureInfo("category", 2, missing=1), np.array([0, -1, 1, 1, 0], np.int32), None,
            Vocabulary(np.array([4, 9])),
        ),
        FeatureColumn(
            "item.genres", FeatureInfo("categories", 3, missing=1), np.array([0, 2, 1], np.int32),
            np.array([0, 2, 2, 3]), genres,
        ),
        FeatureColumn(
            "item.year", FeatureInfo("number", mean=2.0, std=0.5, missing=1), np.array([1, np.nan, 1000], np.float32)
        ),
        FeatureColumn(
            "item.content", FeatureInfo("vector", 2, missing=1),
            np.array([[1, 2], [np.nan, np.nan], [3, 4]], np.float32),
        ),
        FeatureColumn("user.age", FeatureInfo("number", mean=1.0, std=1.0, log=True), np.array([0, 3], np.float32)),
        FeatureColumn("action.click", FeatureInfo("binary", mean=0.6), np.array([1, 0, 1, 1, 0], np.int8)),
    ]  # fmt: skip
    return write_store(tmp_path / "store", [[0, 1, 2], [2, 0]], 3, features=features)


def test_a_batch_carries_features_of_events_items_and_users(store: Store) -> None:
    batch = event_batch(store, np.array([1, 0]), np.array([3, 1]), np.array([2, 2]), COLUMNS)
    assert batch.items.values.tolist() == [2, 0, 1, 2] and batch.targets is None
    assert batch.features["tab"].tolist() == [2, 1, 0, 2], "row 0 is a missing value"
    genres = batch.features["genres"]
    assert isinstance(genres, Jagged) and [row.tolist() for row in genres] == [[2], [1, 3], [], [2]]
    assert batch.features["year"].tolist() == [[5, 0], [-2, 0], [0, 1], [5, 0]], "far values count as five deviations"
    assert batch.features["content"].tolist() == [[3, 4], [1, 2], [0, 0], [3, 4]]
    assert batch.user_features["age"].numpy() == pytest.approx(np.array([[np.log(4) - 1, 0], [-1, 0]]))
    assert batch.actions["click"].tolist() == [1, 0, 0, 1] and batch.actions["click"].dtype == torch.float32
    moved = batch.to("cpu").pin_memory() if torch.cuda.is_available() else batch.to("cpu")
    assert moved.features.keys() == batch.features.keys() and moved.user_features.keys() == {"age"}
    assert moved.actions.keys() == {"click"}


def test_rows_are_selected_of_every_kind(store: Store) -> None:
    batch = history_batch(store, np.array([0, 1]), np.array([2, 4]), 5, columns=COLUMNS)
    chosen = dataclasses.replace(batch, trained=torch.tensor([1, 2])).at_trained()
    assert chosen.features["tab"].tolist() == [0, 2] and chosen.actions["click"].tolist() == [0, 1]
    assert [row.tolist() for row in chosen.features["genres"]] == [[], [2]]
    genres = store.features["item.genres"].table_row_lists(np.array([-1, 0, 2]))
    jagged = Jagged.from_lengths(*map(torch.from_numpy, genres))
    assert [row.tolist() for row in select(jagged, torch.tensor([2, 1, 0, 1]))] == [[2], [1, 3], [], [1, 3]]


def test_every_training_event_is_an_input_where_its_own_action_is_predicted(store: Store) -> None:
    loader = Loader(
        store, Split.of(store, "leave-one-out"), max_len=2, batch_size=8, shuffle=False, every_event=True,
        window="split", columns=COLUMNS,
    )  # fmt: skip
    batch = loader.batch(0, 0)
    assert batch.events.tolist() == [0, 1, 3] and batch.targets is None and loader.num_tokens == 3
    assert batch.next_times.tolist() == batch.times.tolist()


def test_features_are_part_of_the_store(store: Store, tmp_path: Path) -> None:
    assert store.features["item.genres"].vocabulary.decode([1]).tolist() == ["b"]
    assert store.features["item.genres"].info.num_rows == 4 and store.features["item.content"].info.width == 2
    assert store.feature_key("tab") == "event.tab" and store.feature_key("nothing") is None
    assert '"schema_version": 2' in (store.path / "manifest.json").read_text(), "earlier releases refuse it"
    assert store_damages(store.path) == ([], None)
    plain = write_store(tmp_path / "plain", [[0, 1, 2], [2, 0]], 3)
    assert "features" not in (plain.path / "manifest.json").read_text()
    assert '"schema_version": 1' in (plain.path / "manifest.json").read_text(), "earlier releases read it"
    assert plain.manifest.content_hash != store.manifest.content_hash
    (store.path / "item.year.npy").write_bytes((store.path / "user.age.npy").read_bytes())
    with pytest.raises(UserError, match=r"item\.year\.npy does not hold what the manifest says"):
        Store.open(store.path)
