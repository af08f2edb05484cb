"""Recipes by name: which file a name or a path means, and what is said where it means none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import turbogr
from turbogr import cli
from turbogr.config import find_recipe, load_config, recipe_file, recipe_names, recipe_summary
from turbogr.errors import Note, UserError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder that is no clone of the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", recipe_names())
def test_every_name_is_a_recipe_with_a_summary(name):
    assert find_recipe(name) == recipe_file(name)
    assert recipe_file(name).is_file()
    assert recipe_summary(name).endswith(".")


def test_names_are_few_words_and_quickstart_comes_first():
    names = recipe_names()
    assert names[0] == "quickstart" and "ml-1m/hstu" in names
    assert not [name for name in names if "." in name or " " in name]


def test_every_recipe_is_in_the_wheel():
    settings = (Path(turbogr.__file__).parents[1] / "pyproject.toml").read_text()
    patterns = re.findall(r'"(recipes/[^"]*)"', settings)
    package = Path(turbogr.__file__).parent
    assert {path for pattern in patterns for path in package.glob(pattern)} == set(map(recipe_file, recipe_names()))


def test_a_clone_shows_the_recipes_at_its_top():
    assert (Path(turbogr.__file__).parents[1] / "recipes" / "quickstart.yaml").samefile(recipe_file("quickstart"))


def test_a_recipe_is_loaded_by_name():
    assert load_config("ml-1m/hstu", ["train.epochs=3"]).train.epochs == 3


def test_a_file_wins_over_a_name(elsewhere):
    (elsewhere / "quickstart").write_text("train: {epochs: 3}")
    assert load_config("quickstart").train.epochs == 3


def test_a_folder_does_not_hide_a_name(elsewhere):
    (elsewhere / "ml-1m" / "hstu").mkdir(parents=True)
    (elsewhere / "quickstart").mkdir()
    assert find_recipe("ml-1m/hstu") == recipe_file("ml-1m/hstu")
    assert find_recipe("quickstart") == recipe_file("quickstart")


@pytest.mark.parametrize("path", ["recipes/quickstart.yaml", "./recipes/quickstart.yaml"])
def test_a_path_of_the_clone_works_anywhere_with_a_note(path):
    with pytest.warns(Note, match=r"no file .*recipes/quickstart.yaml; taking the installed recipe 'quickstart'"):
        assert find_recipe(path) == recipe_file("quickstart")


def test_a_path_in_a_folder_of_ones_own_is_never_replaced(elsewhere):
    (elsewhere / "recipes").mkdir()
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        find_recipe("recipes/quickstart.yaml")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("quikstart", "Did you mean 'quickstart'?"),
        ("Quickstart", "Did you mean 'quickstart'?"),
        ("quickstart.yaml", "Did you mean 'quickstart'?"),
        ("/opt/recipes/ml-1m/hstu.yaml", "Did you mean 'ml-1m/hstu'?"),
        ("ml1m/hstu", "Did you mean 'ml-1m/hstu'?"),
        ("ml-1m-hstu", "Did you mean 'ml-1m/hstu'?"),
        ("paper", "Did you mean 'paper/fuxi' or"),
        ("sasrec", "--set model.name=sasrec"),
        ("mien.yaml", "Did you mean 'mine.yaml'?"),
        ("elephant", "no recipe of that name. `turbogr recipes`"),
    ],
)
def test_what_is_no_recipe_is_refused_with_what_was_meant(elsewhere, given, words):
    (elsewhere / "mine.yaml").write_text("")
    with pytest.raises(UserError) as refused:
        find_recipe(given)
    assert words in str(refused.value)
    assert "`turbogr recipes` lists the names" in str(refused.value)


def test_a_recipe_s_earlier_name_works_with_a_note(elsewhere):
    with pytest.warns(Note, match="the recipe paper/fuxi-gamma is now paper/fuxi; the old name still works"):
        assert find_recipe("paper/fuxi-gamma") == recipe_file("paper/fuxi")


def test_folders_are_refused_with_what_is_in_them(elsewhere):
    (elsewhere / "run").mkdir()
    (elsewhere / "run" / "config.yaml").write_text("")
    (elsewhere / "ml-1m").mkdir()
    (elsewhere / "other").mkdir()
    with pytest.raises(UserError, match=r"run: it is a run folder; its recipe is run/config\.yaml"):
        find_recipe("run")
    with pytest.raises(UserError, match=r"Recipes of that name: .*ml-1m/hstu,"):
        find_recipe("ml-1m")
    with pytest.raises(UserError, match="other: it is a folder"):
        find_recipe("other")


def test_the_command_lists_prints_and_copies(elsewhere, capsys):
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in recipe_names())
    assert cli.main(["recipes", "quickstart"]) == 0
    printed = capsys.readouterr().out
    assert printed == recipe_file("quickstart").read_text()
    assert cli.main(["recipes", "quickstart", "--out", "mine.yaml"]) == 0
    assert "turbogr train mine.yaml" in capsys.readouterr().err
    assert (elsewhere / "mine.yaml").read_text() == printed
    assert load_config("mine.yaml") == load_config("quickstart")


def test_the_command_replaces_nothing(elsewhere, capsys):
    (elsewhere / "mine.yaml").write_text("keep")
    assert cli.main(["recipes", "quickstart", "--out", "mine.yaml"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (elsewhere / "mine.yaml").read_text() == "keep"
    assert cli.main(["recipes", "--out", "other.yaml"]) == 2
    assert "name the recipe to copy" in capsys.readouterr().err


def test_commands_take_names(elsewhere, capsys):
    for command in (["train", "quickstrat"], ["sweep", "quickstrat", "--dry-run"]):
        assert cli.main([*command, "--data", "x", "--out", "y"]) == 2
        assert "Did you mean 'quickstart'?" in capsys.readouterr().err
    assert cli.main(["train", "quickstart", "--data", "nowhere", "--out", "y"]) == 2
    assert "nowhere" in capsys.readouterr().err
