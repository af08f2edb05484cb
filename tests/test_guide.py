"""The guide and the results say what the code does: their commands parse and the reference is current."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import turbogr
from turbogr import cli, machine, table_training

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


def log_of_a_shop(path):
    """Write a small log with the users and items that the pages name."""
    generator = np.random.default_rng(0)
    users = ["alice", "bob", *(f"user-{n}" for n in range(40))]
    rows = ["user_id,item_id,timestamp"]
    for user in users:
        start = int(generator.integers(30))
        rows += [f"{user},i{(start + step) % 30},{1_700_000_000 + 60 * step}" for step in range(12)]
    path.write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("page", ["docs/guide/python.md", "README.md"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    (tmp_path / "quick.yaml").write_text(
        "model: {dim: 8, num_blocks: 1, num_heads: 1, max_len: 8}\ntrain: {epochs: 1, tensorboard: false}\n"
    )
    monkeypatch.setattr(table_training, "RECIPE", tmp_path / "quick.yaml")
    for name in ("events.csv", "clicks.csv"):
        log_of_a_shop(tmp_path / name)
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()


def test_make_targets_of_the_guide_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in PAGES:
        for name in re.findall(r"^make ([a-z]+)", page.read_text(encoding="utf-8"), re.M):
            assert name in targets, f"{page.name}: make {name}"
