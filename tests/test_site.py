"""The static site: how pages are staged, and that the check of the built one finds what is wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SITE = Path(__file__).parents[1] / "tools" / "site"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def staging() -> ModuleType:
    pytest.importorskip("latex2mathml", reason="the packages of `make docs` are not installed")
    return module("stage")


def test_every_page_is_staged_with_its_links_and_formulas(staging: ModuleType, tmp_path: Path) -> None:
    pages = staging.stage(tmp_path / "pages")
    assert {Path("index.md"), Path("guide/quick-start.md"), Path("operators/index.md"), Path("api/index.md")} <= set(
        pages
    )
    for page in pages:
        assert (tmp_path / "pages" / page).exists()
    settings = json.loads((tmp_path / "site.yml").read_text())
    assert [next(iter(entry)) for entry in settings["nav"]][:2] == ["Home", "Guide"]
    theory = (tmp_path / "pages" / "theory" / "adagrad.md").read_text()
    assert "```math" not in theory and "<math" in theory and "<merror" not in theory
    assert "::: turbogr.table_training.train" in (tmp_path / "pages" / "api" / "index.md").read_text()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("`$x$` stays, as `[a](b)` does", "`$x$` stays, as `[a](b)` does"),
        ("```\n$x$ [a](b)\n```", "```\n$x$ [a](b)\n```"),
        ("it costs $5 and $6", "it costs $5 and $6"),
        ("[a `b`](c.md#d)", "[a `b`](<c.md#d>)"),
        ("![plot](x.svg)", "![plot](<x.svg>)"),
    ],
)
def test_only_links_and_formulas_change(staging: ModuleType, text: str, wanted: str) -> None:
    assert staging._rendered(text, lambda link: f"<{link}>") == wanted


def test_formulas_become_mathml(staging: ModuleType) -> None:
    inline = staging._rendered(r"with $\mathbb E_t x_i^2\le\mathcal{F}$.", str)
    assert inline.startswith("with <span><math") and "𝔼" in inline and "ℱ" in inline
    assert "*" not in inline and "_" not in inline
    block = staging._rendered("a\n```math\n\\frac{a}{b}\n```\nb", str)
    assert "<mfrac>" in block and 'display="block"' in block


def test_a_link_that_leads_nowhere_names_its_page(staging: ModuleType) -> None:
    page = Path(staging.ROOT, "README.md")
    with pytest.raises(ValueError, match=r"gone\.md"):
        staging._link("gone.md", page, {page: Path("index.md")}, {})


def test_rows_of_the_comparison_become_a_page(staging: ModuleType) -> None:
    row = {"claim": "a | b", "paper": None, "ratio": None, "ours": 0.5, "verdict": "falls short", "kind": "measured",
           "paper_conditions": "p", "conditions": "c", "command": "turbogr bench paper"}  # fmt: skip
    text = staging._paper_page({"rows": [row], "machine": {"cores": 2}, "command": "x"})
    assert "1 fall short" in text and "**a \\| b**" in text and "| – | 0.5 | – | falls short, measured |" in text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<p id=a>x</p><p><a href='#a'>y</a>", ""),
        ("<div><span></div>", "</div> closes nothing"),
        ("<a href='b.html'>x</a>", "b.html leads nowhere"),
        ("<a href='#b'>x</a>", "#b leads to no heading"),
        ("<script src='https://cdn.example/x.js'></script>", "from elsewhere"),
        ("<a href='https://example.org'>fine</a>", ""),
        ("<i id=a></i><i id=a></i>", "is there twice"),
    ],
)
def test_the_check_finds_what_is_wrong(body: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<!doctype html><html><body>{body}</body></html>")
    found = module("check").check(tmp_path)
    assert (words in "\n".join(found)) if words else not found
