"""A run folder, or several, as one self-contained HTML page: no network, no other file, readable without JavaScript.

The page is a list of sections. Each is a function from `RunData` to a `Section`, which names its template, or to None
for a run that has nothing to show there. Raw ids come from the user's log and may be hostile: every template escapes
them, and the page's policy runs no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from turbogr import __version__
from turbogr.errors import UserError
from turbogr.files import check_writable, replace_text
from turbogr.plot import STYLE
from turbogr.report import comparison, wording
from turbogr.report.actions_section import actions
from turbogr.report.comparison import Comparison
from turbogr.report.data_section import data
from turbogr.report.groups_section import groups
from turbogr.report.learning_section import learning
from turbogr.report.recommendations_section import recommendations
from turbogr.report.result_section import headline, metrics
from turbogr.report.run_data import RunData
from turbogr.report.section import Section
from turbogr.report.settings_section import origin, settings
from turbogr.report.speed_section import speed

SectionBuilder = Callable[[RunData], Section | None]

SECTIONS: tuple[SectionBuilder, ...] = (
    headline,
    recommendations,
    metrics,
    actions,
    groups,
    learning,
    data,
    settings,
    origin,
    speed,
)

_FOLDER = Path(__file__).parent


COMPARISON: tuple[Callable[[Comparison], Section | None], ...] = (
    comparison.summary,
    comparison.metrics,
    comparison.groups,
    comparison.learning,
    comparison.differences,
)


def write_report(
    run: Path | str | Sequence[Path | str], out: Path | str | None = None, *, data: Path | str | None = None
) -> Path:
    """Write the report of the run folder `run` to `out` (default: report.html in it) and return its path.

    Several runs give one page that compares them, by default comparison.html in the current folder. `data` is where the
    store of a single run is now if it was moved.

    Raises:
        UserError: `run` is not a run folder, or `out` is a folder, lies in none, or in one that cannot be written.
    """
    runs = [run] if isinstance(run, str | Path) else list(run)
    if not runs:
        raise UserError("no run to report on; name at least one run folder")
    if len(runs) > 1:
        if data is not None:
            raise UserError("--data names the store of one run; leave it out to compare several")
        target = Path("comparison.html" if out is None else out)
        check_writable(target, "--out")
        replace_text(target, render_comparison(Comparison.read(runs)), follow_link=True)
        return target
    content = RunData.read(runs[0], data)
    target = content.path / "report.html" if out is None else Path(out)
    check_writable(target, "the report" if out is None else "--out")
    replace_text(target, render(content), follow_link=out is not None)
    return target


def render(run: RunData, sections: Sequence[SectionBuilder] = SECTIONS) -> str:
    """Return the page of `run` with the given sections in their order."""
    built = [section for build in sections if (section := build(run)) is not None]
    return _page(
        built,
        run=run,
        name=run.name,
        kind="run report",
        status=str(run.info.get("status") or "unknown"),
        when=wording.date(run.info.get("finished") or run.info.get("created")),
        problems=run.problems,
        paths=[run.path],
    )


def render_comparison(page: Comparison) -> str:
    """Return the page that compares several runs."""
    built = [section for build in COMPARISON if (section := build(page)) is not None]
    return _page(
        built,
        name=" · ".join(page.runs),
        kind="comparison of runs",
        status="",
        when="",
        problems=page.problems,
        paths=[run.path for run in page.runs.values()],
    )


def _page(sections: list[Section], **values: Any) -> str:
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
        **values,
        sections=sections,
        # Both are our own files: escaping would break them, and neither has a closing tag.
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )
    # JSON and file names may have lone surrogates, which UTF-8 cannot encode.
    return page.encode("utf-8", "replace").decode("utf-8")
