"""The command that writes the tables and figures of docs/theory/check.md, and the pages themselves."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tools.theory import bounds, check
from tools.theory.problem import constants
from tools.theory.simulate import Measured

DOCS = Path(__file__).parents[2] / "docs" / "theory"
PAGES = sorted(DOCS.glob("*.md"))
SCALE = check.Scale()
LR = bounds.largest_lr(constants(check.even(1)), max(check.DELAYS))
QUIET = "one row, no noise, large ε"


def test_the_command_keeps_the_text_and_replaces_the_tables(tmp_path, capsys):
    page = tmp_path / "check.md"
    page.write_text("words\n" + check.MARK + "old tables\n", encoding="utf-8")
    assert check.main(["--steps", "3", "--seeds", "2", "--out", str(tmp_path)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("words\n" + check.MARK)
    assert "old tables" not in text
    assert all(f"Theorem {number}" in text for number in (1, 2, 3, 4, "4′", 5))
    for name in ("delay.svg", "alpha.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
    assert "137 of 137 bounds hold" in capsys.readouterr().out


def test_the_command_fails_where_a_bound_does(tmp_path, capsys, monkeypatch):
    (tmp_path / "check.md").write_text(check.MARK, encoding="utf-8")
    monkeypatch.setattr(check.bounds, "any_delays", lambda *args, **kwargs: 1e-9)
    assert check.main(["--steps", "3", "--seeds", "2", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "α = 1, τ = 5: measured" in printed and "above the bound 1e-09" in printed
    assert "121 of 137 bounds hold" in printed


def test_a_page_without_the_mark_is_not_changed(tmp_path):
    (tmp_path / "check.md").write_text("words\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must contain the line"):
        check.run(check.Scale(3, 2), tmp_path)
    assert (tmp_path / "check.md").read_text(encoding="utf-8") == "words\n"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seeds", "1"]])
def test_runs_without_an_average_or_an_error_are_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        check.main([*arguments, "--out", str(tmp_path)])
    assert "at least one step and two seeds" in capsys.readouterr().err


def test_popular_rows_make_alpha_large_and_the_collision_rate_not():
    rows, alpha, rate = check.popularity(10_000, 1000)
    assert 0.99 < alpha <= 1
    assert 0.1 < rate < 0.4
    assert 300 < rows < 1000


def rows_of(page):
    """The rows of the tables that the command writes, by (theorem, problem, delay): (measured, error, bound, stale)."""
    found, theorem = {}, ""
    for line in page.read_text(encoding="utf-8").partition(check.MARK)[2].splitlines():
        if line.startswith("### "):
            theorem = line.partition(":")[0].removeprefix("### ")
        elif "±" in line:
            problem, delay, measured, bound, stale, _ = (cell.strip() for cell in line.strip("|").split("|"))
            numbers = (*measured.split("±"), bound, stale)
            found[theorem, problem, int(delay)] = tuple(float(number) for number in numbers)
    return found


def test_the_page_has_every_row_and_bound_of_the_command(tmp_path, monkeypatch):
    """At the scale of the page; bounds need no runs, but those of Theorem 4′ contain a measured J."""
    nothing = Measured(**{field.name: torch.ones(2, dtype=torch.float64) for field in fields(Measured)})
    monkeypatch.setattr(check, "simulate", lambda *args, **kwargs: nothing)
    (tmp_path / "check.md").write_text(check.MARK, encoding="utf-8")
    check.run(check.Scale(), tmp_path)
    shown, made = rows_of(DOCS / "check.md"), rows_of(tmp_path / "check.md")
    assert list(shown) == list(made) and len(shown) == 137
    for name, (_, _, bound, stale) in made.items():
        measured, error, *sides = shown[name]
        assert measured - 4 * error <= sides[0], name
        if name[0] != "Theorem 4′":
            assert sides == pytest.approx([bound, stale], rel=6e-3), name  # of three digits
    text = (DOCS / "check.md").read_text(encoding="utf-8")
    assert f"{check.Scale.steps:,} steps, {check.Scale.seeds} seeds." in text
    assert text.endswith(check._popularity_table())


@pytest.mark.parametrize(
    ("theorem", "problem", "run"),
    [
        (
            "Theorem 1",
            "α = 1",
            lambda *rest: check.check_any_delays(check.periodic((1,) * 4, 1.0), *rest, 0.02, 1.5, SCALE),
        ),
        ("Theorem 2", "even, α = 1", lambda *rest: check.check_scheduled(check.even(1), *rest, LR, SCALE)[0]),
        ("Theorem 3", "even, α = 1", lambda *rest: check.check_scheduled(check.even(1), *rest, LR, SCALE)[1]),
        ("Theorem 4", QUIET, lambda name, delay: check.check_adagrad(check.nearly_sgd(SCALE.steps), delay, SCALE)),
        ("Theorem 4′", QUIET, lambda name, delay: check.check_table(check.nearly_sgd(SCALE.steps), delay, SCALE)),
        ("Theorem 5", "α = 0.1", lambda name, delay: check.check_bounded_steps(10, delay, SCALE)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_page_shows_what_the_command_measures(theorem, problem, run):
    outcome = run(problem, 1)
    measured, _, bound, _ = rows_of(DOCS / "check.md")[theorem, problem, 1]
    assert measured == pytest.approx(outcome.measured.value, rel=1e-3)  # of four digits
    assert bound == pytest.approx(outcome.bound, rel=1e-3)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist_and_formulas_are_closed(page):
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
