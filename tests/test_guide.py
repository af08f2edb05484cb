"""The guide and the results say what the code does: their commands parse and the reference is current."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import turbogr
from turbogr import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "guide").glob("*.md"), *(DOCS / "results").glob("*.md"), *ROOT.glob("*.md")])
COMMANDS = [
    (page.name, line.removeprefix(".venv/bin/"))
    for page in PAGES
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    for line in block.replace("\\\n", " ").splitlines()
    if re.match(r"(\.venv/bin/)?turbogr [a-z]", line)
]


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 8


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_the_guide_parses(page, line):
    arguments = shlex.split(line, comments=True)[1:]
    parser = cli._build_parser(arguments[0])
    _, unknown = parser.parse_known_args(arguments)
    assert not unknown


def test_the_config_reference_is_current():
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "tools" / "config_reference.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.TARGET.read_text(encoding="utf-8") == tool.reference(), "run `make format`"


def test_every_name_of_the_api_is_in_the_guide():
    page = (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")
    assert [name for name in turbogr.__all__ if f"turbogr.{name}" not in page] == []
    for name in re.findall(r"turbogr\.(\w+)\(", page):
        assert name in turbogr.__all__


def test_make_targets_of_the_guide_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in PAGES:
        for name in re.findall(r"^make ([a-z]+)", page.read_text(encoding="utf-8"), re.M):
            assert name in targets, f"{page.name}: make {name}"
