"""A run folder as one self-contained HTML page: no network, no other file, readable without JavaScript.

The page is a list of sections; each is a function from a `Run` to a `Section`, which names its template. Raw ids come
from the user's log and may be hostile: every template escapes, and the page's policy runs no script but our own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from turbogr import __version__
from turbogr.files import check_target, replace_text
from turbogr.report import origin, progress, quality, wording
from turbogr.report.run import Run
from turbogr.report.section import Section
from turbogr.report.svg import STYLE

SectionBuilder = Callable[[Run], Section]

SECTIONS: tuple[SectionBuilder, ...] = (
    quality.headline,
    quality.metrics,
    progress.learning,
    quality.recommendations,
    progress.speed,
    origin.data,
    origin.settings,
    origin.origin,
)

_FOLDER = Path(__file__).parent


def write_report(run: Path | str, out: Path | str | None = None) -> Path:
    """Write the report of the run folder `run` to `out` (default: report.html in it) and return its path.

    Raises:
        UserError: `run` is not a run folder, or `out` is a folder, lies in none, or in one that cannot be written.
    """
    content = Run.read(run)
    target = content.path / "report.html" if out is None else Path(out)
    check_target(target, "the report" if out is None else "--out")
    replace_text(target, render(content))
    return target


def render(run: Run, sections: Sequence[SectionBuilder] = SECTIONS) -> str:
    """Return the page of `run` with the given sections in their order."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_FOLDER / "script.js").read_text(encoding="utf-8")
    style = (_FOLDER / "style.css").read_text(encoding="utf-8") + STYLE
    page = environment.get_template("page.html").render(
        run=run,
        model=quality.model_name(run),
        status=str(run.info.get("status") or "unknown"),
        when=wording.date(run.info.get("finished") or run.info.get("created")),
        sections=[build(run) for build in sections],
        # Both are our own files; escaping would break them, and neither holds a closing tag.
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )
    # JSON and file names can hold lone surrogates, which UTF-8 cannot.
    return page.encode("utf-8", "replace").decode("utf-8")
