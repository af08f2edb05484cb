"""Stage the pages of the static site: `python tools/site/stage.py DIR`; `make docs` then builds them with mkdocs.

The site has the pages of the repository as they are on GitHub: README.md, ARCHITECTURE.md, CONTRIBUTING.md, docs/ and
the operators' READMEs. Links to other files of the repository lead to copies of these. Formulas become MathML here, so
that pages need no script for them. The API's page is written from `turbogr.__all__`. The comparison with the paper is a
page of its own where docs/results/paper/ has one.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "docs" / "results" / "paper" / "paper.json"
_SECTIONS = {
    "Guide": "docs/guide",
    "Models": "docs/models",
    "Operators": "turbogr/ops",
    "Theory": "docs/theory",
    "Results": "docs/results",
}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
_CODE = re.compile(r"^```.*?^```[^\n]*$|``[^`]+``|`[^`\n]+`", re.S | re.M)
_MATH_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.S | re.M)
_MATH_INLINE = re.compile(r"(?<![\\$\w])\$(?=\S)((?:[^$\\]|\\.)+?)(?<=\S)\$(?![\d$])")
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_STYLE = """math { font-size: 1.05em; }
math[display="block"] { overflow-x: auto; overflow-y: hidden; padding: .3rem 0; max-width: 100%; }
.md-typeset table:not([class]) { font-size: .68rem; }
.md-typeset img { max-width: 100%; }
.md-grid { max-width: 76rem; }
"""


def stage(target: Path) -> list[Path]:
    """Write all pages and the files that they link to into an empty folder; return the pages, relative to it.

    Raises:
        ValueError: a link that leads nowhere, or a formula that cannot be rendered; names the page.
    """
    shutil.rmtree(target, ignore_errors=True)
    pages = {ROOT / name: Path(name) for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")}
    pages[ROOT / "README.md"] = Path("index.md")
    for section in _SECTIONS.values():
        for page in sorted((ROOT / section).rglob("*.md")):
            folder = Path("operators" if section == "turbogr/ops" else section.removeprefix("docs/"))
            name = "index.md" if page.name == "README.md" else page.name
            pages[page] = folder / page.relative_to(ROOT / section).with_name(name)
    files: dict[Path, Path] = {}
    for page, staged in pages.items():
        text = page.read_text(encoding="utf-8")
        try:
            text = _rendered(_COMMENT.sub("", text), lambda link, page=page: _link(link, page, pages, files))
        except Exception as error:
            raise ValueError(f"{page.relative_to(ROOT)}: {error}") from error
        _write(target / staged, text)
    for source, staged in files.items():
        (target / staged).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / staged)
    _write(target / "site.css", _STYLE)
    api = _api_page(target)
    staged = [*pages.values(), api]
    if PAPER.exists():
        _write(target / "results" / "paper.md", _paper_page(json.loads(PAPER.read_text(encoding="utf-8"))))
        staged.append(Path("results", "paper.md"))
    _write(target.with_name("site.yml"), _config(target, staged))
    return staged


def _config(target: Path, pages: list[Path]) -> str:
    """Return the configuration of mkdocs: that of this folder, with where the pages are and how they are found."""
    nav: list[Any] = [{"Home": ["index.md", {"Architecture": "ARCHITECTURE.md"}, {"Contributing": "CONTRIBUTING.md"}]}]
    for title, source in _SECTIONS.items():
        folder = "operators" if source == "turbogr/ops" else source.removeprefix("docs/")
        inside = sorted(str(page) for page in pages if page.parts[0] == folder)
        nav.append({title: sorted(inside, key=lambda name, first=f"{folder}/index.md": name != first)})
    nav.append({"API": "api/index.md"})
    settings = {
        "INHERIT": os.path.relpath(Path(__file__).with_name("mkdocs.yml"), target.parent),
        "docs_dir": target.name,
        "site_dir": "site",
        "nav": nav,
    }
    return json.dumps(settings, indent=1)  # JSON is YAML


def _paper_page(record: dict[str, Any]) -> str:
    """Return the page of the comparison with the paper, from its record."""
    rows = record["rows"]
    short = sum(row["verdict"] == "falls short" for row in rows)
    reached = sum(row["verdict"] == "reached" for row in rows)
    lines = [
        "# Beside the paper", "",
        f"{reached} rows reach the paper's figure, {short} fall short, {len(rows) - reached - short} have nothing of "
        "the same kind to reach. The machines differ, so read the conditions.", "",
        "| claim | paper | ours | ours ÷ paper | result |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        paper, ratio = (f"{row[key]:.4g}" if row[key] is not None else "–" for key in ("paper", "ratio"))
        details = f"Paper: {row['paper_conditions']}<br>Ours: {row['conditions']}<br>`{row['command']}`"
        cells = [
            f"**{row['claim']}**<br>{details}",
            paper,
            f"{row['ours']:.4g}",
            ratio,
            f"{row['verdict']}, {row['kind']}",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    machine = ", ".join(f"{key}: {value}" for key, value in record["machine"].items())
    return "\n".join([*lines, "", f"Machine: {machine}.", "", f"`{record['command']}`", ""])


def _rendered(text: str, link: Callable[[str], str]) -> str:
    """Return a page with links led to their targets and formulas as MathML; code stays as it is."""
    kept: list[str] = []

    def keep(found: str) -> str:
        kept.append(found)
        return f"\x00{len(kept) - 1}\x00"

    text = _MATH_BLOCK.sub(lambda match: keep(_mathml(match[1], "block")), text)
    # A formula in backquotes is GitHub's other way to write one.
    text = re.sub(r"\$`([^`]+)`\$", lambda match: keep(_mathml(match[1], "inline")), text)
    text = _CODE.sub(lambda match: keep(match[0]), text)
    text = _MATH_INLINE.sub(lambda match: keep(_mathml(match[1], "inline")), text)
    text = _LINK.sub(lambda match: match[1] + link(match[2]) + match[3], text)
    while "\x00" in text:
        text = re.sub("\x00(\\d+)\x00", lambda match: kept[int(match[1])], text)
    return text


def _mathml(formula: str, display: str) -> str:
    formula = re.sub(r"\\(?:tfrac|dfrac)\b", r"\\frac", formula)
    # Browsers ignore MathML's variants of letters; the letters of their own they show.
    formula = re.sub(r"\\math(bb|cal)\s*(?:\{([A-Z])\}|([A-Z]))", lambda m: _letter(m[1], m[2] or m[3]), formula)
    made = convert(formula.strip(), display=display)
    if "<merror" in made:
        raise ValueError(f"cannot render the formula {formula.strip()!r}")
    # Markdown must find no markup inside.
    made = made.replace("*", "&#x2A;").replace("_", "&#x5F;").replace("|", "&#x7C;").replace("\n", " ")
    # A line that began with <math> would be a paragraph of its own.
    return f"\n\n{made}\n\n" if display == "block" else f"<span>{made}</span>"


def _letter(style: str, letter: str) -> str:
    """Return a double-struck (bb) or script (cal) capital; some are older than the rest and have other names."""
    kind = {"bb": "DOUBLE-STRUCK", "cal": "SCRIPT"}[style]
    try:
        return unicodedata.lookup(f"MATHEMATICAL {kind} CAPITAL {letter}")
    except KeyError:
        return unicodedata.lookup(f"{kind} CAPITAL {letter}")


def _link(link: str, page: Path, pages: dict[Path, Path], files: dict[Path, Path]) -> str:
    """Return where a link of a page leads on the site; files that are no pages are added to `files`."""
    if re.match(r"[a-z]+:", link) or link.startswith("#"):
        return link
    path, hash_, anchor = link.partition("#")
    source = (page.parent / path).resolve()
    if source.is_dir() and source / "README.md" in pages:
        source = source / "README.md"
    if source in pages:
        target = pages[source]
    elif source.is_file():
        inside = source.relative_to(ROOT)
        target = Path(str(inside).removeprefix("docs/"))
        if target.suffix not in (".svg", ".png", ".json", ".html"):
            target = Path("source", f"{inside}.txt")  # shown by a browser, not saved
        files[source] = target
    elif source.is_dir():
        target = _listing(source, files)
    else:
        raise ValueError(f"the link {link} leads nowhere")
    return os.path.relpath(target, pages[page].parent) + hash_ + anchor


def _listing(folder: Path, files: dict[Path, Path]) -> Path:
    """Return the file that stands for a folder: the first in it, in the order of names."""
    first = min(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".py", ".md", ".yaml", ".cpp"))
    files[first] = Path("source", f"{first.relative_to(ROOT)}.txt")
    return files[first]


def _api_page(target: Path) -> Path:
    """Write a page with every public name of the package."""
    tree = ast.parse((ROOT / "turbogr" / "__init__.py").read_text(encoding="utf-8"))
    listed = next(
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )  # fmt: skip
    names = [name for name in ast.literal_eval(listed) if not name.startswith("_")]
    where = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }  # fmt: skip
    lines = [
        "# API reference",
        "",
        "What `import turbogr` gives. How to use it: [From Python](../guide/python.md).",
        "",
    ]
    for name in names:
        lines += [f"::: {where.get(name, f'turbogr.{name}')}", ""]
    _write(target / "api" / "index.md", "\n".join(lines))
    return Path("api", "index.md")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    print(f"{len(stage(Path(sys.argv[1])))} pages staged in {sys.argv[1]}")
