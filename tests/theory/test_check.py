"""The command that makes the tables and figures of docs/theory/check.md, and the pages themselves."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.theory import check

DOCS = Path(__file__).parents[2] / "docs" / "theory"
PAGES = sorted(DOCS.glob("*.md"))


def test_the_command_keeps_the_words_and_replaces_the_tables(tmp_path, capsys):
    page = tmp_path / "check.md"
    page.write_text("words\n" + check.MARK + "old tables\n", encoding="utf-8")
    assert check.main(["--steps", "3", "--seeds", "2", "--out", str(tmp_path)]) in (0, 1)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("words\n" + check.MARK)
    assert "old tables" not in text
    assert all(f"Theorem {number}" in text for number in (1, 2, 3, 4, "4′", 5))
    for name in ("delay.svg", "alpha.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
    assert "bounds hold" in capsys.readouterr().out


def test_a_page_without_the_mark_is_left_alone(tmp_path):
    (tmp_path / "check.md").write_text("words\n", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks the line"):
        check.run(check.Scale(3, 2), tmp_path)
    assert (tmp_path / "check.md").read_text(encoding="utf-8") == "words\n"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seeds", "1"]])
def test_runs_without_an_average_or_an_error_are_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        check.main([*arguments, "--out", str(tmp_path)])
    assert "a step and two seeds at least" in capsys.readouterr().err


def test_popular_rows_make_alpha_large_and_the_collision_rate_not():
    rows, alpha, rate = check.popularity(10_000, 1000)
    assert 0.99 < alpha <= 1
    assert 0.1 < rate < 0.4
    assert 300 < rows < 1000


def test_the_page_shows_what_the_command_found():
    text = (DOCS / "check.md").read_text(encoding="utf-8").partition(check.MARK)[2]
    rows = [line.split("|") for line in text.splitlines() if "±" in line]
    assert len(rows) >= 60
    for cells in rows:
        measured, error = (float(part) for part in cells[3].split("±"))
        assert check.Outcome(cells[1], int(cells[2]), check.Mean(measured, error), float(cells[4]), 0.0).holds


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_formulas_are_closed(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    blocks = re.findall(r"^```math\n(.*?)^```", text, re.S | re.M)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for paragraph in prose.split("\n\n"):
        assert paragraph.count("$") % 2 == 0, paragraph
    for formula in [*blocks, *re.findall(r"\$([^$]+)\$", prose)]:
        assert formula.count("{") == formula.count("}"), formula
        assert formula.count("\\left") - formula.count("\\leftarrow") == formula.count("\\right"), formula
        assert formula.count("\\lVert") == formula.count("\\rVert"), formula
        assert formula.count("\\langle") == formula.count("\\rangle"), formula
