"""Features of events: several tables from the recipe to checkpoints, evaluation and recommendation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.ranks import run_ranks
from tests.parallel.training import train_steps
from tests.training.conftest import make_config, write_store
from tests.training.test_pipeline import train_epochs, trainer_of, weights, with_pipeline
from turbogr import machine
from turbogr.config import Config, FeatureConfig, TableConfig, dump_config, load_config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.recommend import load
from turbogr.runs import open_run
from turbogr.training.run import resolve_against, train

FEATURES = {
    "rating": FeatureConfig(),
    "hour": FeatureConfig(table="clock"),
    "minute": FeatureConfig(column="hour", table="clock"),
}
TABLES = {"clock": TableConfig(dim=6, optimizer="adagrad", lr=0.05), "item": TableConfig(lr=5e-3)}


@pytest.fixture(autouse=True)
def _no_gemm_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)


def with_missing(items: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    ratings = (items % 5).astype(np.float64)
    ratings[::7] = np.nan
    return ratings


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    actions = {"rating": with_missing, "hour": lambda items: (items * 7) % 24}
    return write_store(tmp_path_factory.mktemp("features") / "store", actions=actions)


@pytest.fixture
def config() -> Config:
    config = make_config()
    small = dataclasses.replace(config.data, batch_size=6)
    return dataclasses.replace(config, data=small, features=FEATURES, tables=TABLES)


def test_tables_follow_from_the_recipe_and_the_data(config: Config, store: Store, tmp_path: Path) -> None:
    resolved = resolve_against(config, store)
    assert resolved.tables["rating"].rows == 4 + 2 and resolved.tables["clock"].rows == 23 + 2
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(resolved))
    assert load_config(path) == resolved
    trainer = trainer_of(config, store, tmp_path / "run")
    assert {spec.name: (spec.num_rows, spec.dim, spec.optimizer) for spec in trainer.tables.specs} == {
        "item": (40, 16, "adam"),
        "rating": (6, 16, "adam"),
        "clock": (25, 6, "adagrad"),
    }
    batch = trainer.loader.batch(0, 0)
    events = batch.events.numpy()
    ratings = store.actions["rating"][events]
    expected = np.where(np.isnan(ratings), 0, np.nan_to_num(ratings) + 1)
    assert np.array_equal(batch.features["rating"].numpy(), expected)
    assert torch.equal(batch.features["hour"], batch.features["minute"])


def test_every_table_is_learnt_and_every_feature_matters(config: Config, store: Store, tmp_path: Path) -> None:
    trainer = trainer_of(config, store, tmp_path / "run")
    before = {name: table.clone() for name, table in trainer.tables.gather_all().items()}
    train_epochs(trainer, 1)
    after = trainer.tables.gather_all()
    for name, table in before.items():
        assert not torch.equal(after[name], table), name
    encoder = trainer.task.encoder(after)  # type: ignore[attr-defined]
    batch = trainer.loader.batch(0, 0)
    plain = encoder.encode_last(batch)
    for name in FEATURES:
        changed = {**batch.features, name: (batch.features[name] + 1) % 6}
        assert not torch.equal(encoder.encode_last(dataclasses.replace(batch, features=changed)), plain), name


@pytest.mark.parametrize("options", [{"depth": 4}, {"mode": "exact_overlap"}], ids=["sync", "exact_overlap"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_sync_and_exact_overlap_are_the_serial_loop_bit_for_bit(
    options: dict[str, Any], clip_norm: float | None, config: Config, store: Store, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip_norm=clip_norm))
    serial = trainer_of(config, store, tmp_path / "serial")
    train_epochs(serial)
    trainer = trainer_of(with_pipeline(config, **options), store, tmp_path / "run")
    train_epochs(trainer)
    for ours, theirs in zip(weights(trainer), weights(serial), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["sync", "semi_async", "exact_overlap"])
def test_a_run_stops_resumes_evaluates_and_recommends(
    mode: str, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.training.test_run import assert_same_end, stop_after

    config = with_pipeline(config, mode=mode)
    train(config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert train(config, store.path, tmp_path / "stopped").status == "interrupted"
    assert train(config, store.path, tmp_path / "stopped", resume=True).status == "finished"
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")
    opened = open_run(tmp_path / "straight")
    assert opened.tables.keys() == {"item", "rating", "clock"}
    recommender = load(tmp_path / "straight")
    (lists,) = [recommender.recommend([[(5003, 60), (5004, 120)]], k=5)]
    assert len(lists) > 0


@pytest.mark.parametrize(("groups", "members"), [(1, 2), (2, 1), (2, 2)])
def test_many_ranks_train_to_the_weights_of_one(
    groups: int, members: int, config: Config, store: Store, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip_norm=None))
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, check_every=2))
    one = train_steps(config, store.path, tmp_path / "one", 1, 6)["state"]
    ranks = run_ranks(groups * members, train_steps, config, store.path, tmp_path / "many", groups, 6)
    assert one.keys() == ranks[0]["state"].keys()
    for name, tensor in one.items():
        np.testing.assert_allclose(ranks[0]["state"][name], tensor, rtol=2e-3, atol=2e-4, err_msg=name)


def train_two_ranks(config: Config, store: Path, run: Path) -> str:
    return train(config, store, run).status


def test_ranks_that_balance_by_measured_cost_train_with_features(config: Config, store: Store, tmp_path: Path) -> None:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=1))
    assert run_ranks(2, train_two_ranks, config, store.path, tmp_path / "run") == ["finished", "finished"]
    assert load_config(tmp_path / "run/config.yaml").parallel.cost is not None


def test_a_missing_value_adds_nothing_before_training(config: Config, store: Store, tmp_path: Path) -> None:
    tables = trainer_of(config, store, tmp_path / "run").tables.gather_all()
    assert not tables["rating"][0].any() and not tables["clock"][0].any() and tables["item"][0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": {"raiting": FeatureConfig()}}, r"needs the column 'raiting', .*Did you mean 'rating'"),
        ({"tables": {"rating": TableConfig(rows=3)}}, r"tables.rating.rows is 3, but .* up to 4 .*set it to 6"),
        ({"tables": {"other": TableConfig(dim=4)}}, r"no feature uses the table 'other'"),
        ({"tables": {"item": TableConfig(rows=4)}}, r"leave tables.item.rows and tables.item.dim out"),
        ({"features": {"rating": FeatureConfig(table="item")}}, r"cannot use the item table"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    change: dict[str, Any], message: str, store: Store, tmp_path: Path
) -> None:
    features = {"features": {"rating": FeatureConfig()}, **change}
    with pytest.raises(UserError, match=message):
        resolve_against(dataclasses.replace(make_config(), **features), store)


@pytest.mark.parametrize(("value", "shown"), [(2.5, "2.5"), (-1.0, "-1")])
def test_values_that_are_no_row_are_named(value: float, shown: str, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", actions={"score": lambda items: np.where(items == 3, value, 1.0)})
    config = dataclasses.replace(make_config(), features={"score": FeatureConfig()})
    with pytest.raises(UserError, match=rf"features.score needs whole numbers from 0 on, .* has {shown}"):
        resolve_against(config, store)
