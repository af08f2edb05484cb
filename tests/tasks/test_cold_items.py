"""Vectors of items without a training event, from their features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.stores import write_store
from tests.tasks.ranking_store import write_ranking_store
from turbogr import machine
from turbogr.bench import run_benchmark
from turbogr.data.split import Split
from turbogr.errors import UserError
from turbogr.tasks.cold_items import cold_items, with_cold_items


def test_an_unseen_item_gets_the_vector_of_its_kind_and_others_keep_theirs(tmp_path):
    store = write_ranking_store(tmp_path / "store")
    tags = np.array(store.features["item.author"].values)
    train_end = np.asarray(store.offsets[1:]).copy()
    missing = [4, 9, 17]
    # A user's training events end before the first event of an item that must not be seen.
    for user in range(store.num_users):
        first, last = int(store.offsets[user]), int(store.offsets[user + 1])
        places = np.flatnonzero(np.isin(store.items[first:last], missing))
        train_end[user] = first + places[0] if len(places) else last
    assert set(missing) <= set(cold_items(store, train_end).tolist())
    torch.manual_seed(0)
    kinds = torch.randn(4, 16)
    table = 3 * kinds[torch.from_numpy(tags)] + 0.1 * torch.randn(store.num_items, 16)
    cold = cold_items(store, train_end)
    table[torch.from_numpy(cold)] = torch.randn(len(cold), 16)
    filled = with_cold_items(table, store, train_end)
    warm = np.setdiff1d(np.arange(store.num_items), cold)
    assert torch.equal(filled[torch.from_numpy(warm)], table[torch.from_numpy(warm)])
    cosines = F.cosine_similarity(filled[torch.from_numpy(cold)], kinds[torch.from_numpy(tags[cold])])
    assert cosines.min() > 0.8, "of 40 items about ten are of a kind"
    before = F.cosine_similarity(table[torch.from_numpy(cold)], kinds[torch.from_numpy(tags[cold])])
    assert before.mean() < 0.5


def test_without_features_or_unseen_items_nothing_changes(tmp_path):
    plain = write_store(tmp_path / "plain", [[0, 1, 2], [2, 1, 0]], 5)
    table = torch.randn(5, 4)
    assert with_cold_items(table, plain, Split.of(plain).train_end) is table
    store = write_ranking_store(tmp_path / "store")
    table = torch.randn(store.num_items, 4)
    assert with_cold_items(table, store, np.asarray(store.offsets[1:])) is table


def test_the_benchmark_holds_items_out_of_training_and_measures_both_kinds(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    rows, start = ["user_id,item_id,timestamp"], 1_650_000_000
    for user in range(60):
        kind = user % 3
        rows += [f"{user},{random.integers(0, 20) * 3 + kind},{start + 3600 * k + user}" for k in range(12)]
    (tmp_path / "log.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "items.csv").write_text("item_id,kind\n" + "".join(f"{i},kind-{i % 3}\n" for i in range(60)))
    cuts = f"time:{start + 8 * 3600},{start + 9 * 3600}"
    settings = {"log": tmp_path / "log.csv", "item_features": tmp_path / "items.csv", "split": cuts, "share": 0.3}
    assignments = [f"{name}={value}" for name, value in {**settings, "epochs": 1}.items()]
    figures = run_benchmark("cold_items", assignments)[0].figures
    assert 0.15 * 60 < figures["num_cold_items"] < 0.45 * 60
    assert figures["num_cold_users"] + figures["num_warm_users"] == 60
    assert figures["chance_hr@50"] == 50 / 60
    with pytest.raises(UserError, match="bench cold_items needs split; give it with --set split="):
        run_benchmark("cold_items", assignments[:2])
