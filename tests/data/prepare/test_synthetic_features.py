"""The synthetic log with features: every column is there, and actions follow from users, items and history."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.csv as pacsv
import pytest

from turbogr.cli import main
from turbogr.data.prepare.sources.event_generator import scatter
from turbogr.data.prepare.sources.feature_generator import _unscattered
from turbogr.data.store import Store

SIZES = ["--num-users", "150", "--num-items", "200", "--mean-length", "30", "--median-length", "22"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("synthetic")
    log = str(folder / "log.csv")
    assert main(["prepare", "synthetic", "--with-features", *SIZES, "--log", log, "--out", str(folder / "s")]) == 0
    return Store.open(folder / "s")


def test_items_users_and_events_have_features_and_actions(store: Store) -> None:
    kinds = {key: column.info.kind for key, column in store.features.items()}
    assert kinds == {
        "action.is_click": "binary", "action.long_view": "binary", "event.tab": "category",
        "item.author_id": "category", "item.seconds": "number", "item.tags": "categories",
        "user.age_group": "category", "user.city": "category", "user.days_since_joining": "number",
    }  # fmt: skip
    clicks = np.asarray(store.features["action.is_click"].values)
    views = np.asarray(store.features["action.long_view"].values)
    assert 0.3 < clicks.mean() < 0.7 and not (views > clicks).any() and 0.3 < views.sum() / clicks.sum() < 0.9


def test_actions_follow_from_items_users_and_tabs(store: Store) -> None:
    clicks = np.asarray(store.features["action.is_click"].values, float)
    users, items = np.repeat(np.arange(store.num_users), store.lengths), np.asarray(store.items)
    tabs = np.asarray(store.features["event.tab"].values)
    for groups, least in ((users, 0.15), (items, 0.15), (tabs, 0.04)):
        sums, counts = np.bincount(groups, clicks), np.bincount(groups)
        enough = counts >= 15
        assert np.std(sums[enough] / counts[enough]) > least


def test_the_written_log_has_what_the_store_has(store: Store) -> None:
    log = pacsv.read_csv(store.path.parent / "log.csv")
    assert {"is_click", "long_view", "tab"} <= set(log.column_names)
    assert log["is_click"].to_numpy().sum() == np.asarray(store.features["action.is_click"].values).sum()


def test_without_the_option_nothing_changes(tmp_path: Path) -> None:
    assert main(["prepare", "synthetic", *SIZES, "--out", str(tmp_path / "plain")]) == 0
    plain = Store.open(tmp_path / "plain")
    assert not plain.features and plain.num_users == 150


@pytest.mark.parametrize("num", [1, 2, 200, 32_038_725])
def test_items_are_found_in_the_catalogue_again(num: int) -> None:
    indices = np.unique(np.linspace(0, num - 1, 50).astype(np.int64))
    assert np.array_equal(_unscattered(scatter(indices, num, 1), num), indices)
