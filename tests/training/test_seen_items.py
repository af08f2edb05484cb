"""What a run does with items that users have had before: chosen from the log, recorded, kept, and how it trains."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.stores import write_store
from tests.training.test_run import assert_same_end, stop_after
from turbogr.config import Config, LossConfig, load_config, load_run_config
from turbogr.data.loader import Loader
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.recommend import load
from turbogr.sweep.grid import Cell
from turbogr.sweep.runner import check
from turbogr.training.run import resolve_against, train
from turbogr.training.step import Stepper
from turbogr.training.trainer import Trainer

NUM_ITEMS = 30


def log_with_repeats(path: Path, num_repeated: int) -> Store:
    """40 users of whom the first `num_repeated` have a repeated validation item; the test items are all repeats."""
    histories = []
    for user in range(40):
        items = [(user + 7 * place) % NUM_ITEMS for place in range(6)]
        validation = items[2] if user < num_repeated else (user + 1) % NUM_ITEMS
        histories.append([*items, validation, items[0]])
    return write_store(path, histories, NUM_ITEMS)


def with_filter(config: Config, filter_seen: bool | None) -> Config:
    return dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, filter_seen=filter_seen))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(("num_repeated", "seen"), [(7, "excluded"), (8, "included")])
def test_the_log_chooses_where_the_config_leaves_it_open(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_repeated: int, seen: str
) -> None:
    store, run = log_with_repeats(tmp_path / "store", num_repeated), tmp_path / "run"
    train(with_filter(config, None), store.path, run)
    excluded = seen == "excluded"
    assert load_run_config(run).evaluate.filter_seen is excluded
    assert load(run).filter_seen is excluded, "recommend delivers what was measured"
    protocol = read(run / "summary.json")["protocol"]
    assert (protocol["seen"], protocol["chosen_by"]) == (seen, "the log")
    assert protocol["repeats"] == {"items": "validation items", "num_items": 40, "num_repeated": num_repeated}
    assert protocol["reason"].startswith(f"{num_repeated} of 40 validation items")
    assert read(run / "run.json")["protocol"].items() <= protocol.items()
    assert f"\n{protocol['reason']}\n" in capsys.readouterr().err
    assert ("earlier items included" in protocol["text"]) == (not excluded)


@pytest.mark.parametrize("filter_seen", [True, False])
def test_a_setting_wins_over_the_log(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], filter_seen: bool
) -> None:
    store, run = log_with_repeats(tmp_path / "store", 20 if filter_seen else 0), tmp_path / "run"
    train(with_filter(config, filter_seen), store.path, run)
    protocol = read(run / "summary.json")["protocol"]
    assert protocol["seen"] == ("excluded" if filter_seen else "included")
    assert protocol["chosen_by"] == "evaluate.filter_seen"
    assert f"as evaluate.filter_seen={str(filter_seen).lower()} says" in capsys.readouterr().err


def test_an_existing_run_keeps_its_protocol(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, run = log_with_repeats(tmp_path / "store", 20), tmp_path / "run"
    train(with_filter(config, True), store.path, run)
    record = read(run / "run.json")
    del record["protocol"]  # as an earlier release wrote it
    (run / "run.json").write_text(json.dumps(record))
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4))
    capsys.readouterr()
    train(with_filter(longer, None), store.path, run, resume=True)
    assert "resuming with evaluate" not in capsys.readouterr().err
    assert load_run_config(run).evaluate.filter_seen is True
    assert read(run / "summary.json")["protocol"]["seen"] == "excluded"

    train(with_filter(longer, False), store.path, run, resume=True)
    assert "resuming with evaluate.filter_seen=False (was True)" in capsys.readouterr().err
    protocol = read(run / "summary.json")["protocol"]
    assert (protocol["seen"], protocol["chosen_by"]) == ("included", "evaluate.filter_seen")


def test_what_chose_the_protocol_is_kept_on_resuming(config: Config, tmp_path: Path) -> None:
    store, run = log_with_repeats(tmp_path / "store", 20), tmp_path / "run"
    train(with_filter(config, None), store.path, run)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4))
    train(with_filter(longer, None), store.path, run, resume=True)
    assert read(run / "summary.json")["protocol"]["chosen_by"] == "the log"


def test_a_sweep_takes_finished_runs_with_their_protocol(config: Config, tmp_path: Path) -> None:
    store, out = log_with_repeats(tmp_path / "store", 20), tmp_path / "sweep"
    train(with_filter(config, True), store.path, out / "mine")
    settings = yaml.safe_load((out / "mine" / "config.yaml").read_text())
    settings["evaluate"]["filter_seen"] = None
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    cell = Cell(tmp_path / "mine.yaml", ())
    assert check([cell], store.path, out) == []
    assert check([cell], store.path, tmp_path / "elsewhere") == [cell]


def test_quickstart_leaves_it_to_the_log_and_published_recipes_leave_seen_items_out() -> None:
    recipes = Path(__file__).parents[2] / "turbogr" / "recipes"
    assert load_config(recipes / "quickstart.yaml").evaluate.filter_seen is None
    published = [path for path in recipes.rglob("*.yaml") if path.parent.name not in ("recipes", "simple")]
    assert published and all(load_config(path).evaluate.filter_seen is True for path in published)
    assert all(load_config(path).data.repeated_targets == "train" for path in published)
    assert load_config(recipes / "quickstart.yaml").data.repeated_targets == "train", "skipping measured worse"


def skipping(config: Config, repeated_targets: Any = "skip") -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, repeated_targets=repeated_targets))


@pytest.mark.parametrize(("filter_seen", "targets"), [(True, "skip"), (False, "train")])
def test_training_targets_agree_with_the_protocol_where_the_config_leaves_it_open(
    config: Config, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], filter_seen: bool, targets: str
) -> None:
    train(skipping(with_filter(config, filter_seen), None), store.path, tmp_path / "run")
    assert load_run_config(tmp_path / "run").data.repeated_targets == targets
    said = re.search(
        r"([\d,]+) training targets \(.*%\) are items that the user has had before", capsys.readouterr().err
    )
    assert (said is not None) == filter_seen
    if said is not None:
        loader = Loader(store, Split.of(store), max_len=16, batch_size=16, skip_repeats=True)
        assert int(said[1].replace(",", "")) == loader.num_targets_skipped > 0


def test_stopping_and_resuming_with_skipped_targets_changes_nothing(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = skipping(config)
    train(config, store.path, tmp_path / "straight")
    for steps in (2, 5):
        run = tmp_path / f"stopped-{steps}"
        with monkeypatch.context() as patch:
            stop_after(patch, steps)
            assert train(config, store.path, run).status == "interrupted"
        assert train(config, store.path, run, resume=True).status == "finished"
        assert_same_end(config, store, tmp_path / "straight", run)


def test_without_repeats_nothing_changes_to_the_last_bit(config: Config, tmp_path: Path) -> None:
    histories = [[(user + 7 * place) % NUM_ITEMS for place in range(user % 8 + 4)] for user in range(40)]
    store = write_store(tmp_path / "store", histories, NUM_ITEMS)
    train(config, store.path, tmp_path / "all")
    train(skipping(config), store.path, tmp_path / "skipped")
    assert_same_end(config, store, tmp_path / "all", tmp_path / "skipped")


def test_an_existing_run_keeps_its_targets(
    config: Config, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, store.path, tmp_path / "run")
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    del settings["data"]["repeated_targets"]  # as 0.1.0 wrote it
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4))
    assert train(skipping(longer, None), store.path, tmp_path / "run", resume=True).status == "finished"
    assert load_run_config(tmp_path / "run").data.repeated_targets == "train"
    with pytest.raises(UserError, match=r"was started with data.repeated_targets=train, not skip"):
        train(skipping(longer), store.path, tmp_path / "run", resume=True)


LOSSES = {
    "sampled": LossConfig(num_negatives=8),
    "in-batch": LossConfig(num_negatives=8, sampler="in-batch"),
    "popularity": LossConfig(num_negatives=8, sampler="popularity"),
    "segments": LossConfig(num_negatives=8, segment_mb=0.001),
    "full": LossConfig(name="full-softmax"),
    "bce": LossConfig(name="bce", num_negatives=8),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_mean_over_the_targets_that_are_trained_on(config: Config, store: Store, loss: str) -> None:
    config = resolve_against(dataclasses.replace(config, loss=LOSSES[loss]), store)
    stepper = Stepper(config, store.num_items, device=torch.device("cpu"), mesh=Mesh(World()))
    batch = Loader(store, Split.of(store), max_len=16, batch_size=16, skip_repeats=True).batch(0, 0)
    assert batch.trained is not None and 0 < len(batch.trained) < batch.num_tokens
    whole = stepper.prepare(dataclasses.replace(batch, trained=None), 3)
    sets = stepper.fetch(whole)
    wanted = stepper.task.token_losses(sets, whole, 3)[batch.trained].mean()
    wanted.backward()
    dense = [parameter.grad.clone() for parameter in stepper.model.parameters()]
    rows = sets.gradients()[0].clone()
    for parameter in stepper.model.parameters():
        parameter.grad = None
    skipped = stepper.prepare(batch, 3)
    found_sets = stepper.fetch(skipped)
    found = stepper.task.loss(found_sets, skipped, 3, seed=None)
    found.backward()
    torch.testing.assert_close(found, wanted)
    for parameter, gradient in zip(stepper.model.parameters(), dense, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    # Rows that only a skipped target needs are not in the batch: an optimiser with momentum would move them.
    ids, found_ids = (group.groups[0].request.ids for group in (sets, found_sets))
    assert set(found_ids.tolist()) <= set(ids.tolist())
    by_id = torch.zeros(store.num_items, rows.shape[1]).index_copy(0, ids.long(), rows)
    found_by_id = torch.zeros_like(by_id).index_copy(0, found_ids.long(), found_sets.gradients()[0])
    torch.testing.assert_close(found_by_id, by_id)


def test_positions_that_share_negatives_share_them_among_trained_ones(config: Config, store: Store) -> None:
    for sharing in ("group", "positions", "logits"):
        loss = LossConfig(num_negatives=4, expansion=2, sharing=sharing)  # type: ignore[arg-type]
        settings = resolve_against(dataclasses.replace(config, loss=loss), store)
        stepper = Stepper(settings, store.num_items, device=torch.device("cpu"), mesh=Mesh(World()))
        batch = Loader(store, Split.of(store), max_len=16, batch_size=16, skip_repeats=True).batch(0, 0)
        prepared = stepper.prepare(batch, 0)
        losses = stepper.task.token_losses(stepper.fetch(prepared), prepared, 0)
        assert batch.trained is not None and losses.shape == batch.trained.shape and losses.isfinite().all()


def test_the_logged_loss_is_a_mean_over_trained_targets(config: Config, store: Store, tmp_path: Path) -> None:
    config = skipping(dataclasses.replace(config, train=dataclasses.replace(config.train, log_every=4, epochs=1)))
    trainer = Trainer(
        resolve_against(config, store), store, tmp_path / "run", device=torch.device("cpu"), peak_flops=None
    )
    losses, weights, flops = [], [], 0.0
    for batch in trainer.loader:
        before = trainer.progress.window.loss_sum
        trainer.step(batch)
        assert batch.trained is not None
        losses.append((trainer.progress.window.loss_sum - before) / len(batch.trained))
        weights.append(len(batch.trained))
        flops += trainer.task.flops(batch.items.lengths).strict - trainer.task.flops_of(batch).strict
    assert trainer.progress.window.trained == sum(weights) == trainer.loader.num_targets
    assert all(0.1 < loss < 20 for loss in losses)
    assert flops == pytest.approx(6 * trainer.loader.num_targets_skipped * 9 * 16), "eight negatives and the target"


def test_skipping_everything_is_an_error_with_a_remedy(config: Config, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [[1] * 6, [2] * 6], 3)
    with pytest.raises(UserError, match=r"all 6 training targets of .* set data.repeated_targets=train"):
        train(skipping(config), store.path, tmp_path / "run")
