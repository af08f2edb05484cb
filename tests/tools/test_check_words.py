from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("check_words", ROOT / "tools" / "check_words.py")
check_words = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_words)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("# the user can mend it", "mend"),
        ("A rank that Dies is named.", "Dies"),
        ("def test_a_mistake_is_told_once():", "told"),
        ("class ToldElsewhere(UserError):", "Told"),
        ("flights = []", "flights"),
        ("they wait in vain", "in vain"),
    ],
)
def test_a_word_of_the_list_is_found(line, word):
    ((number, found, plainer),) = check_words.find_words(f"first line\n{line}\n")
    assert (number, found) == (2, word) and plainer


@pytest.mark.parametrize(
    "line",
    [
        "a recommender",
        "ideal, dealer",
        "in flight",
        "batches_in_flight",
        "untold",
        "bodies",
        "mend  # words: allow",
        "",
    ],
)
def test_other_words_are_not_found(line):
    assert list(check_words.find_words(line)) == []


def test_files_under_version_control_are_checked(tmp_path, capsys):
    for name in ("a.py", "b.md", "c.json", "new.py"):
        (tmp_path / name).write_text("fine\nmended\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "add", "a.py", "b.md", "c.json"], cwd=tmp_path, check=True)
    assert check_words.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [f"{name}:2: 'mended'; plainer: fix" for name in ("a.py", "b.md")]
    (tmp_path / "a.py").write_text("fine\n")
    (tmp_path / "b.md").unlink()
    assert check_words.main(tmp_path) == 0


def test_this_repository_has_none_of_the_words():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: files under version control are unknown")
    assert check_words.find_problems(ROOT) == []
