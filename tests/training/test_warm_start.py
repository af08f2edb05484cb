"""A new run on tomorrow's log starts from what today's has learned."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turbogr.config import Config, FeatureConfig
from turbogr.data.prepare.preparation import prepare
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.runs import load_model
from turbogr.training.run import resolve_against, train
from turbogr.training.trainer import Trainer
from turbogr.training.warm_start import WarmStart


def write_log(path: Path, *, items: range, seed: int) -> Path:
    random = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp"])
        for user in range(30):
            for time in range(12):
                writer.writerow([user, f"item-{random.choice(items)}", 1_600_000_000 + 1000 * seed + time])
    return path


@pytest.fixture
def today(tmp_path: Path) -> Store:
    return prepare("csv", [write_log(tmp_path / "today.csv", items=range(50, 90), seed=0)], tmp_path / "today")


@pytest.fixture
def tomorrow(tmp_path: Path, today: Store) -> Store:
    log = write_log(tmp_path / "tomorrow.csv", items=range(20, 90), seed=1)
    return prepare("csv", [log], tmp_path / "tomorrow", extend=today.path)


def test_known_items_keep_their_vectors_and_new_ones_are_drawn(
    config: Config, today: Store, tomorrow: Store, tmp_path: Path
) -> None:
    train(config, today.path, tmp_path / "first")
    first = load_model(tmp_path / "first")
    assert tomorrow.num_items > today.num_items

    start = WarmStart(tmp_path / "first", tomorrow)
    settings = resolve_against(config, tomorrow)
    fresh = Trainer(settings, tomorrow, tmp_path / "x", device=torch.device("cpu"), peak_flops=None)
    drawn = fresh.tables.gather("item").clone()
    start.apply(fresh.model, fresh.tables)
    known = today.num_items
    assert list(tomorrow.item_ids.decode(np.arange(known))) == list(today.item_ids.decode(np.arange(known)))
    assert torch.equal(fresh.tables.gather("item")[:known], first.tables["item"])
    assert torch.equal(fresh.tables.gather("item")[known:], drawn[known:])
    for name, parameter in fresh.model.named_parameters():
        assert torch.equal(parameter, dict(first.task.model.named_parameters())[name]), name


def test_a_warm_run_trains_and_takes_over_the_sizes(
    config: Config, today: Store, tomorrow: Store, tmp_path: Path
) -> None:
    train(config, today.path, tmp_path / "first")
    open_sizes = dataclasses.replace(config.model, dim=None, max_len=None)
    again = dataclasses.replace(config, model=open_sizes)
    result = train(again, tomorrow.path, tmp_path / "second", init_from=tmp_path / "first")
    assert result.status == "finished"
    second = load_model(tmp_path / "second")
    assert second.task.model.max_len == 16 and second.tables["item"].shape == (tomorrow.num_items, 16)


def test_another_catalogue_or_another_model_is_refused(config: Config, today: Store, tmp_path: Path) -> None:
    train(config, today.path, tmp_path / "first")
    other = prepare("csv", [write_log(tmp_path / "o.csv", items=range(30), seed=2)], tmp_path / "other")
    with pytest.raises(UserError, match=r"does not extend the data of .*--extend"):
        train(config, other.path, tmp_path / "second", init_from=tmp_path / "first")
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, num_blocks=2))
    with pytest.raises(UserError, match="the model differs"):
        train(wider, today.path, tmp_path / "second", init_from=tmp_path / "first")
    assert not (tmp_path / "second").exists()


def test_a_run_with_other_features_is_refused_by_their_names(config: Config, today: Store, tmp_path: Path) -> None:
    log = write_log(tmp_path / "rated.csv", items=range(50, 90), seed=0)
    lines = log.read_text().splitlines()
    rated = [f"{lines[0]},rating", *(f"{line},{number % 5}" for number, line in enumerate(lines[1:]))]
    log.write_text("\n".join(rated) + "\n")
    store = prepare("csv", [log], tmp_path / "rated", keep_columns=["rating"])
    rating = dataclasses.replace(config, features={"rating": FeatureConfig()})
    train(config, store.path, tmp_path / "plain")
    train(rating, store.path, tmp_path / "with")
    with pytest.raises(UserError, match="was trained with the feature rating, and this recipe has no features"):
        train(config, store.path, tmp_path / "second", init_from=tmp_path / "with")
    with pytest.raises(
        UserError, match=r"with no features, and this recipe has the feature rating.*without --init-from"
    ):
        train(rating, store.path, tmp_path / "second", init_from=tmp_path / "plain")
    assert train(rating, store.path, tmp_path / "second", init_from=tmp_path / "with").status == "finished"


def test_two_trainers_cannot_share_a_folder(config: Config, today: Store, tmp_path: Path) -> None:
    train(config, today.path, tmp_path / "run")
    handle = os.open(tmp_path / "run", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is training"):
            train(config, today.path, tmp_path / "run", resume=True)
    finally:
        os.close(handle)


def test_a_store_that_was_replaced_in_place_is_refused(config: Config, today: Store, tmp_path: Path) -> None:
    train(config, today.path, tmp_path / "first")
    log = write_log(tmp_path / "other.csv", items=range(200, 300), seed=3)
    prepare("csv", [log], today.path, overwrite=True)
    with pytest.raises(UserError, match="does not extend the data"):
        train(config, today.path, tmp_path / "second", init_from=tmp_path / "first")


def test_a_chain_of_extensions_is_accepted_without_its_first_link(
    config: Config, today: Store, tomorrow: Store, tmp_path: Path
) -> None:
    train(config, today.path, tmp_path / "first")
    log = write_log(tmp_path / "later.csv", items=range(40), seed=4)
    later = prepare("csv", [log], tmp_path / "later", extend=tomorrow.path)
    shutil.rmtree(today.path)
    assert train(config, later.path, tmp_path / "second", init_from=tmp_path / "first").status == "finished"


def test_the_fingerprint_is_of_the_first_rows(today: Store, tomorrow: Store) -> None:
    known = today.num_items
    assert today.item_ids.fingerprint(known) == tomorrow.item_ids.fingerprint(known)
    assert today.item_ids.fingerprint(known) != tomorrow.item_ids.fingerprint(known + 1)
    assert today.user_ids.fingerprint(3) != today.item_ids.fingerprint(3)


class _Killed(BaseException):
    """What stands for SIGKILL."""


def kill_before_the_first_checkpoint(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> None:
    def killed(self: Trainer) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", killed)
        with pytest.raises(_Killed):
            train(*args, **options)


def weights(run: Path) -> list[torch.Tensor]:
    trained = load_model(run, "last")
    return [*trained.task.model.parameters(), *trained.tables.values()]


def test_a_run_that_is_resumed_before_its_first_checkpoint_starts_from_the_initial_run_again(
    config: Config, today: Store, tomorrow: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    train(config, today.path, first)
    open_sizes = dataclasses.replace(config, model=dataclasses.replace(config.model, dim=None, max_len=None))
    train(open_sizes, tomorrow.path, tmp_path / "straight", init_from=first)
    for name, again in (("without", None), ("with", os.path.relpath(first))):
        run = tmp_path / name
        kill_before_the_first_checkpoint(monkeypatch, open_sizes, tomorrow.path, run, init_from=first)
        assert train(open_sizes, tomorrow.path, run, resume=True, init_from=again).status == "finished"
        for one, other in zip(weights(tmp_path / "straight"), weights(run), strict=True):
            assert torch.equal(one, other)
    shutil.rmtree(first)
    longer = dataclasses.replace(open_sizes, train=dataclasses.replace(config.train, epochs=4))
    assert train(longer, tomorrow.path, tmp_path / "with", resume=True, init_from=first).step > 0, "it is not needed"


def test_an_initial_run_that_is_gone_or_changed_is_refused_until_there_is_a_checkpoint(
    config: Config, today: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, run = tmp_path / "first", tmp_path / "run"
    train(config, today.path, first)
    kill_before_the_first_checkpoint(monkeypatch, config, today.path, run, init_from=first)
    first.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"must start from .*first again.*does not exist.*in another --out"):
        train(config, today.path, run, resume=True)
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=5))
    train(other, today.path, first)
    with pytest.raises(UserError, match=r"must start from .*first again.*checkpoint there is another one now; put"):
        train(config, today.path, run, resume=True)
    shutil.rmtree(first)
    (tmp_path / "moved").rename(first)
    assert train(config, today.path, run, resume=True).status == "finished"


def test_resuming_with_another_initial_run_is_refused_by_both_names(
    config: Config, today: Store, tmp_path: Path
) -> None:
    first, run = tmp_path / "first", tmp_path / "run"
    train(config, today.path, first)
    with pytest.raises(UserError, match=r"first was started without --init-from, not with --init-from .*other"):
        train(config, today.path, first, resume=True, init_from=tmp_path / "other")
    train(config, today.path, run, init_from=first)
    with pytest.raises(UserError, match=r"run was started with --init-from .*first, not with --init-from .*other"):
        train(config, today.path, run, resume=True, init_from=tmp_path / "other")
