"""Every test that docs/results/reliability.md names exists, and it names one for each of the thirteen proofs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/results/reliability.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_of_the_page_exists() -> None:
    for path, name in NAMED.findall(PAGE):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_each_of_the_thirteen_proofs_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)$", PAGE, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 14))
    assert all(NAMED.search(row) for _, row in rows)
