"""A simple method as what a run trains: the same folder, commands and rules as a network's run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

import turbogr
from tests.training.conftest import write_store
from turbogr import cli
from turbogr.config import find_recipe, ignored_settings, load_config, load_run_config, recipe_file
from turbogr.data.store import Store
from turbogr.errors import Note, UserError
from turbogr.evaluation.job_pool import Interrupted
from turbogr.plugins import built_in_names
from turbogr.simple.method_settings import SECTIONS
from turbogr.simple.methods import METHODS
from turbogr.tasks.method_task import MethodTask
from turbogr.training.run import train

QUICK = ["evaluate.baselines=[popularity,markov]"]


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.fixture
def fitted(store: Store, tmp_path: Path) -> Path:
    train("ease", store.path, tmp_path / "run", overrides=QUICK)
    return tmp_path / "run"


def test_the_registry_names_every_method_and_its_settings():
    assert built_in_names("method") == list(METHODS)
    for name, method in METHODS.items():
        fields = set() if name not in SECTIONS else set(SECTIONS[name].__dataclass_fields__)
        assert fields == set(method.choices(100))


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_a_recipe_of_its_name_that_trains_and_recommends(name, store, tmp_path):
    assert find_recipe(name) == recipe_file(f"simple/{name}")
    result = train(name, store.path, tmp_path / "run", overrides=["evaluate.baselines=[markov]"])
    summary = summary_of(tmp_path / "run")
    assert (result.status, summary["status"], summary["delivered"]) == ("finished", "finished", name)
    assert set(summary["baselines"]) == {"markov"}
    found = turbogr.load(tmp_path / "run").recommend([1000], k=3)
    assert len(found[0]) == 3


def test_a_model_may_be_a_plain_name(tmp_path):
    config = load_config(recipe(tmp_path, "model: ease\nease: {l2: 7}\n"), ["ease.popularity_weight=0.5"])
    assert (config.method, config.options["ease"].l2, config.options["ease"].popularity_weight) == ("ease", 7.0, 0.5)
    assert load_config("quickstart").method is None


def test_the_run_folder_is_complete_and_evaluates_to_what_was_delivered(fitted):
    names = {"config.yaml", "run.json", "environment.json", "metrics.jsonl", "summary.json", "samples.json"}
    assert names <= {path.name for path in fitted.iterdir()} and (fitted / "positions" / "test-step-0.npz").exists()
    summary = summary_of(fitted)
    assert summary["metrics"] == summary["model_metrics"] and summary["protocol"]["seen"] == "included"
    assert "ease fitted on the training events with l2" in summary["protocol"]["text"]
    again = turbogr.evaluate(fitted)
    common = {name: summary["metrics"][name] for name in again.metrics}
    assert again.metrics == common and again.delivered == "ease"
    assert turbogr.load(fitted).metrics == summary["metrics"]
    assert json.loads((fitted / "run.json").read_text())["model"] == {"name": "ease", "title": METHODS["ease"].title}


def test_chosen_settings_are_stored_and_start_the_same_run_again(fitted, store, tmp_path):
    chosen = load_run_config(fitted).options["ease"]
    assert None not in (chosen.l2, chosen.popularity_weight)
    train(fitted / "config.yaml", store.path, tmp_path / "again")
    assert summary_of(tmp_path / "again")["metrics"] == summary_of(fitted)["metrics"]


def test_fixed_settings_are_used_and_change_the_result(fitted, store, tmp_path):
    train("ease", store.path, tmp_path / "fixed", overrides=[*QUICK, "ease.l2=3000", "ease.popularity_weight=0.3"])
    section = load_run_config(tmp_path / "fixed").options["ease"]
    assert (section.l2, section.popularity_weight) == (3000.0, 0.3)
    assert summary_of(tmp_path / "fixed")["metrics"] != summary_of(fitted)["metrics"]


def test_resuming_a_finished_run_does_nothing_and_other_settings_are_refused(fitted, store, monkeypatch):
    before = (fitted / "summary.json").stat().st_mtime_ns
    monkeypatch.setattr(MethodTask, "choose", lambda *_: pytest.fail("it is fitted already"))
    assert train("ease", store.path, fitted, overrides=QUICK, resume=True).status == "finished"
    assert (fitted / "summary.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"started with ease.l2="):
        train("ease", store.path, fitted, overrides=[*QUICK, "ease.l2=12345"], resume=True)
    with pytest.raises(UserError, match=r"started with model.name=ease, not hstu"):
        train("quickstart", store.path, fitted, resume=True)


def test_an_interruption_leaves_a_run_that_resumes(store, tmp_path, monkeypatch):
    def interrupted(*_):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(MethodTask, "choose", interrupted)
        assert train("ease", store.path, tmp_path / "run", overrides=QUICK).status == "interrupted"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    with pytest.raises(UserError, match=r"is not fitted yet: l2, popularity_weight of ease are not chosen"):
        turbogr.load(tmp_path / "run")
    assert train("ease", store.path, tmp_path / "run", overrides=QUICK, resume=True).status == "finished"
    assert turbogr.load(tmp_path / "run").metrics


def test_settings_without_a_meaning_are_named_and_defaults_are_not(store, tmp_path):
    given = load_config("quickstart", ["model.name=ease", "train.epochs=7"])
    ignored = ignored_settings(given)
    assert {"optimizer.lr", "train.epochs", "model.num_heads"} <= set(ignored) and "defaults" not in ignored
    with pytest.warns(Note, match=r"ease is fitted in one go .* are ignored: .*train.epochs"):
        train("quickstart", store.path, tmp_path / "a", overrides=[*QUICK, "model.name=ease", "train.epochs=7"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        train("ease", store.path, tmp_path / "b", overrides=QUICK)


def test_what_makes_no_sense_is_refused(store, tmp_path, fitted):
    with pytest.raises(UserError, match=r"recent-items recommends items .* set evaluate.filter_seen=false"):
        train("recent-items", store.path, tmp_path / "a", overrides=["evaluate.filter_seen=true"])
    with pytest.raises(UserError, match=r"leave out (--init-from|init_from=)"):
        train("ease", store.path, tmp_path / "b", init_from=fitted)
    with pytest.raises(UserError, match=r"is a run of ease, which has no parameters"):
        train("quickstart", store.path, tmp_path / "c", init_from=fitted)
    with pytest.raises(UserError, match=r"l2 of a simple method must be positive"):
        load_config("ease", ["ease.l2=0"])
    with pytest.raises(UserError, match=r"choose from hstu, .*ease-recency. Did you mean 'ease'"):
        load_config("quickstart", ["model.name=eas"])
    with pytest.raises(UserError, match=r"no vectors"):
        turbogr.load(fitted).item_vectors()


def test_a_method_that_the_catalogue_is_too_large_for_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setattr("turbogr.simple.ease.MAX_ITEMS", 10)
    with pytest.raises(UserError, match=r"fitted for at most 10; choose another model.name"):
        train("ease", store.path, tmp_path / "run")


def test_what_is_best_is_delivered_where_asked_for_and_opened_again(store, tmp_path):
    names = "evaluate.baselines=[skip-markov,ease]"
    train("popularity", store.path, tmp_path / "run", overrides=[names, "deliver.choose=best"])
    summary = summary_of(tmp_path / "run")
    assert summary["delivered"] != "popularity" and summary["metrics"] != summary["model_metrics"]
    again = turbogr.evaluate(tmp_path / "run")
    assert again.delivered == summary["delivered"]
    assert {name: summary["metrics"][name] for name in again.metrics} == again.metrics


def test_without_validation_items_the_last_training_items_choose(tmp_path):
    store = write_store(tmp_path / "one", split="leave-one-out")
    train("ease", store.path, tmp_path / "run", overrides=QUICK)
    assert summary_of(tmp_path / "run")["metrics"]["hr@10"] > 0


def test_commands_work_on_it(fitted, store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["evaluate", str(fitted)]) == 0
    assert "ease " in capsys.readouterr().out
    assert cli.main(["recommend", str(fitted), "--out", "r.csv", "--k", "2"]) == 0
    assert cli.main(["report", str(fitted)]) == 0
    page = (fitted / "report.html").read_text()
    assert "EASE" in page and "nan" not in page.lower().split("<body")[1].replace("finance", "")
    sweep = ["sweep", "ease", "popularity", "--data", str(store.path), "--out", "s", "--set", QUICK[0]]
    assert cli.main(sweep) == 0
    assert "popularity" in capsys.readouterr().out
    assert cli.main([*sweep, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("finished") == 2
