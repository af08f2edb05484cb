"""The README shows the demo's output in the words that the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.tiny import train_arguments

ROOT = Path(__file__).parents[2]
SIZES = ["--num-users", 120, "--num-items", 60, "--mean-length", 12, "--median-length", 10, "--max-length", 40]


def demo_lines():
    """The README's lines of the demo's output."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(r"<!-- demo: [^>]*-->\s*```\n(.*?)```", readme, re.S)[1].splitlines()


def wording(line):
    """A line with # for every number and one space for any space, as neither depends on the words.

    What is delivered depends on the log, so it is left out.
    """
    line = re.sub(r"^Delivered: .*, (best on the validation items) .*", r"Delivered: \1", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,]*(\.\d+)?", "#", line)).strip()


@pytest.fixture
def output(turbogr, tmp_path, monkeypatch):
    """All lines that the demo's commands print, for a small log and model."""
    monkeypatch.chdir(tmp_path)
    commands = [
        ["prepare", "synthetic", "--out", "demo/data", *SIZES],
        train_arguments("demo/data", "demo/run"),
        ["recommend", "demo/run", "--k", "10", "--out", "demo/recommendations.csv"],
        ["evaluate", "demo/run"],
        ["report", "demo/run"],
    ]
    lines = []
    for command in commands:
        status, out, err = turbogr(*command)
        assert status == 0
        lines += f"{out}{err}".replace(f"{tmp_path}/", "").splitlines()
    return lines


def test_the_readme_shows_eight_lines():
    assert len(demo_lines()) == 8


def test_the_demo_prints_what_the_readme_shows(output):
    known = {wording(line) for line in output}
    assert [line for line in demo_lines() if wording(line) not in known] == []
