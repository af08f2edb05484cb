"""What a run does with items that users have had before: chosen from the log, recorded, and kept on resuming."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stores import write_store
from turbogr.config import Config, load_config, load_run_config
from turbogr.data.store import Store
from turbogr.recommend import load
from turbogr.sweep.grid import Cell
from turbogr.sweep.runner import check
from turbogr.training.run import train

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
    published = [path for path in recipes.rglob("*.yaml") if path.name != "quickstart.yaml"]
    assert published and all(load_config(path).evaluate.filter_seen is True for path in published)
