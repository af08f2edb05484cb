from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import turbogr
from tests.stores import write_store
from turbogr import cli
from turbogr.errors import Note, UserError
from turbogr.option_names import command_line, in_python


@pytest.fixture(autouse=True)
def options_as_written() -> None:
    """These tests are Python callers."""


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("choose another --out, or move", "choose another out=, or move"),
        ("continue it with --resume, or", "continue it with resume=True, or"),
        ("say where it is with --data DIR", "say where it is with data="),
        ("use --ties=random", "use ties='random'"),
        ("--min-user-events must be 1", "min_user_events= must be 1"),
        ("use --min-user-events=3.", "use min_user_events=3."),
        ("write it like --where='rating >= 4'", "write it like where='rating >= 4'"),
        ("say --split=time:2024-01-01T00:00:00Z instead", "say split='time:2024-01-01T00:00:00Z' instead"),
        ("raise it with --set train.epochs=5 or", "raise it with overrides={'train.epochs': 5} or"),
        ("--include-seen recommends these", "filter_seen=False recommends these"),
        (
            "a folder that `turbogr train RECIPE --data DIR --out RUN` wrote",
            "a folder that `turbogr.train(recipe, data=dir, out=run)` wrote",
        ),
        (
            "make one with `turbogr prepare SOURCE PATH... --out data/x`",
            "make one with `turbogr.prepare(source, path, out='data/x')`",
        ),
        ("train it first with `turbogr train`", "train it first with `turbogr.train()`"),
        ("the file runs/--out and a--b stay", "the file runs/--out and a--b stay"),
        ("no option at all - or -- two dashes", "no option at all - or -- two dashes"),
    ],
)
def test_options_are_arguments_in_python(written: str, read: str) -> None:
    assert in_python(written) == read
    assert in_python(read) == read, "a message may be read twice"
    for kind in (UserError, Note):
        assert str(kind(written)) == read
        with command_line():
            assert str(kind(written)) == re.sub(r"(--[a-z-]+)=", r"\1 ", written)


def test_a_message_speaks_to_its_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(tmp_path / "data", [[0, 1, 2, 3]] * 4, 4)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: hstu}")
    arguments = ["train", str(recipe), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    assert "choose another --out, continue it with --resume" in capsys.readouterr().err
    with pytest.raises(UserError, match="choose another out=, continue it with resume=True"):
        turbogr.train(recipe, tmp_path / "data", tmp_path / "run")


def test_warnings_about_data_speak_to_their_caller(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time\n" + "".join(f"{u},{i},5\n" for u in range(9) for i in range(9)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turbogr.prepare("csv", [tmp_path / "log.csv"], tmp_path / "store")
    (ties,) = [str(warning.message) for warning in caught if "ties" in str(warning.message)]
    assert "ties='random'" in ties and "--" not in ties
