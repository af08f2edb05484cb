"""Check a built site: `python tools/site/check.py DIR`.

Every tag is closed, every link and anchor leads somewhere in the site, every id is there once, and nothing is loaded
from elsewhere.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("object", "data"),
    ("source", "src"),
}
_OPTIONAL = {"p", "li", "dt", "dd", "option", "tr", "td", "th", "thead", "tbody"}  # HTML closes them itself


class Page(HTMLParser):
    """A page's links, ids and errors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.errors: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.errors += [f"<{tag}> is not closed" for tag in self._open if tag not in _OPTIONAL]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self._open.append(tag)
        for name, value in attrs:
            value = value or ""
            outside = urlsplit(value).scheme in ("http", "https") or value.startswith("//")
            canonical = ("rel", "canonical") in attrs
            if (tag, name) in _LOADED and outside and not canonical:
                self.errors.append(f"<{tag}> loads {value} from elsewhere")
            if name == "id":
                if value in self.ids:
                    self.errors.append(f"the id {value} is there twice")
                self.ids.add(value)
            if name in ("href", "src", "data") and value and not outside and (tag, name) != ("a", "data"):
                self.links.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open[-1] != tag and self._open[-1] in _OPTIONAL:
            self._open.pop()
        if self._open and self._open[-1] == tag:
            self._open.pop()
        elif tag not in _VOID:
            self.errors.append(f"</{tag}> closes nothing")


def check(site: Path) -> list[str]:
    """Return what is wrong, a line each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no pages"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: {error}" for error in page.errors]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or (name.name == "404.html"):  # mailto, data; 404 is shown at any address
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name}: the link {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{name}: the link {link} leads to no heading")
    return found


if __name__ == "__main__":
    wrong = check(Path(sys.argv[1]))
    print("\n".join(wrong[:40]) or "the site is whole: tags, ids, links and anchors, and nothing from elsewhere")
    sys.exit(bool(wrong))
