"""A run folder as one self-contained HTML page: no network, no other file, readable without JavaScript.

The page is a list of sections. Each is a function from `RunData` to a `Section`, which names its template, or to None
for a run that has nothing to show there. Raw ids come from the user's log and may be hostile: every template escapes
them, and the page's policy runs no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from turbogr import __version__
from turbogr.files import check_writable, replace_text
from turbogr.plot import STYLE
from turbogr.report import wording
from turbogr.report.data_section import data
from turbogr.report.learning_section import learning
from turbogr.report.recommendations_section import recommendations
from turbogr.report.result_section import headline, metrics, model_title
from turbogr.report.run_data import RunData
from turbogr.report.section import Section
from turbogr.report.settings_section import origin, settings
from turbogr.report.speed_section import speed

SectionBuilder = Callable[[RunData], Section | None]

SECTIONS: tuple[SectionBuilder, ...] = (
    headline,
    metrics,
    learning,
    recommendations,
    speed,
    data,
    settings,
    origin,
)

_FOLDER = Path(__file__).parent


def write_report(run: Path | str, out: Path | str | None = None, *, data: Path | str | None = None) -> Path:
    """Write the report of the run folder `run` to `out` (default: report.html in it) and return its path.

    `data` is where the store of the run is now if it was moved.

    Raises:
        UserError: `run` is not a run folder, or `out` is a folder, lies in none, or in one that cannot be written.
    """
    content = RunData.read(run, data)
    target = content.path / "report.html" if out is None else Path(out)
    check_writable(target, "the report" if out is None else "--out")
    replace_text(target, render(content))
    return target


def render(run: RunData, sections: Sequence[SectionBuilder] = SECTIONS) -> str:
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
        model=model_title(run),
        status=str(run.info.get("status") or "unknown"),
        when=wording.date(run.info.get("finished") or run.info.get("created")),
        sections=[section for build in sections if (section := build(run)) is not None],
        # Both are our own files: escaping would break them, and neither has a closing tag.
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )
    # JSON and file names may have lone surrogates, which UTF-8 cannot encode.
    return page.encode("utf-8", "replace").decode("utf-8")
