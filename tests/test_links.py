"""Every link between the pages leads to a file and a heading that exist; every path in code is that of a file."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "turbogr").rglob("*.md")])
FOLDERS = ("csrc", "docs", "examples", "recipes", "tests", "tools", "turbogr")


@cache
def prose(page):
    """The page's text without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


@cache
def anchors(page):
    """The anchors that GitHub gives to the page's headings."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        repeats = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{repeats}" if repeats else slug)
    return found


def targets(page):
    """The page's relative links as (path, anchor); the path is empty for an anchor on the page itself."""
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [tuple(link.partition("#")[::2]) for link in links if not re.match(r"https?://", link)]


def test_there_are_links_with_and_without_anchors():
    found = [target for page in PAGES for target in targets(page)]
    assert sum(bool(anchor) for _, anchor in found) > 10
    assert sum(not anchor for _, anchor in found) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for path, anchor in targets(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} does not exist"
        assert target.is_relative_to(ROOT), f"{path} is outside of the repository"
        assert not anchor or anchor in anchors(target), f"{path} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_code_exist(page):
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*{{}},-]+)`", prose(page)):
        for one in expand(path):
            assert list(ROOT.glob(one.rstrip("/"))), f"{one} does not exist"


def expand(path):
    """`a/{b,c}.md` -> a/b.md, a/c.md."""
    found = re.search(r"\{([^}]*)\}", path)
    if found is None:
        return [path]
    return [each for choice in found[1].split(",") for each in expand(path.replace(found[0], choice, 1))]
