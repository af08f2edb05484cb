"""The report in a real browser: it fits the screen, draws its charts, answers the pointer and asks nobody for anything.

Set TURBOGR_CHROMIUM to the browser's program if it is not on the PATH, and TURBOGR_SCREENSHOTS to a folder to keep
pictures of the pages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.report.conftest import write_run
from tests.report.test_intervals import NAMES, draw, measure
from turbogr.report.page import write_report

# This folder is not a package, so its helper is loaded by path.
_spec = importlib.util.spec_from_file_location("report_browser", Path(__file__).with_name("browser.py"))
browser_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = browser_module
_spec.loader.exec_module(browser_module)

PROGRAM = browser_module.find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium: install chromium or name one in TURBOGR_CHROMIUM to test the report in it"
)

VISIBLE_CHARTS = """
[...document.querySelectorAll("svg.chart")].filter((svg) => svg.checkVisibility()).map((svg) => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height, box.left, box.right];
})
"""

# Text boxes of each visible chart that leave the chart, or that lie over one another.
CROWDED = """
[...document.querySelectorAll("svg.chart")].filter((svg) => svg.checkVisibility()).flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
  const out = texts.filter(([, b]) =>
    b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1);
  const over = [];
  texts.forEach(([name, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 4) over.push(`${svg.getAttribute("aria-label")}: '${name}' over '${other}'`);
  }));
  return [...out.map(([name]) => `${svg.getAttribute("aria-label")}: '${name}' leaves the chart`), ...over];
})
"""

OVERFLOWING = """
[...document.querySelectorAll("body *")].filter((node) => {
  const box = node.getBoundingClientRect();
  const exempt = node.closest("svg, pre, .skip") || (innerWidth < 390 && node.closest(".scroll"));
  return node.checkVisibility() && !exempt && box.right > document.documentElement.clientWidth + 1;
}).map((node) => node.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def browser():
    with browser_module.Browser(PROGRAM) as running:
        yield running


@pytest.fixture(scope="module")
def full_report(finished_run):
    return write_report(finished_run)


def keep_picture(browser, name: str) -> None:
    folder = os.environ.get("TURBOGR_SCREENSHOTS")
    if folder:
        browser.screenshot(Path(folder) / f"{name}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 700, 1280, 2200])
def test_the_page_fits_every_screen(browser, full_report, width, scheme):
    browser.open(full_report, width=width, scheme=scheme)
    keep_picture(browser, f"report-{width}-{scheme}")
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOWING) == []
    charts = browser.evaluate(VISIBLE_CHARTS)
    assert len(charts) == 10
    for chart_width, chart_height, left, right in charts:
        assert chart_width > 250
        assert chart_height > 80
        assert left >= 0
        assert right <= width
    assert browser.evaluate(CROWDED) == []
    assert "31.4 %" in browser.evaluate("document.querySelector('h1').innerText")


@pytest.fixture(scope="module")
def crowded_pages(tmp_path_factory, store):
    """A run with nine baselines, titles of all lengths and long names, and its comparison with others."""
    folder = tmp_path_factory.mktemp("crowded")
    runs = [write_run(folder / name, store) for name in ("quickstart-run-of-a-wide-model", "small", "third")]
    for seed, run in enumerate(runs):
        systems = {"model": draw(seed, 0), **{name: draw(k, 0.2 * k - 0.6) for k, name in enumerate(NAMES)}}
        measure(run, systems)
        samples = json.loads((run / "samples.json").read_text())
        for user in samples["users"]:
            for place, entry in enumerate(user["history"] + user["recommendations"]):
                entry["title"] = "A title of several words, Part II " * (1 + place % 4) + "x" * 60 * (place % 2)
        (run / "samples.json").write_text(json.dumps(samples))
    return write_report(runs[0]), write_report(runs, folder / "comparison.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", [0, 1])
def test_many_methods_and_several_runs_fit(browser, crowded_pages, page, width, scheme):
    browser.open(crowded_pages[page], width=width, scheme=scheme)
    keep_picture(browser, f"{'crowded' if page == 0 else 'comparison'}-{width}-{scheme}")
    assert browser.complaints() == [] and browser.requests() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate(CROWDED) == []
    cut = browser.evaluate(
        "[...document.querySelectorAll('svg.chart text')].filter((t) => t.checkVisibility()"
        " && t.textContent.includes('…')).map((t) => t.textContent)"
    )
    assert cut == [], "no label is cut"


def test_text_of_charts_is_readable_on_a_phone(browser, full_report):
    browser.open(full_report, width=390)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.chart')].filter((svg) => svg.checkVisibility())"
        ".map((svg) => 11 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"
    )
    assert min(sizes) >= 10.5


def test_dark_and_light_differ_and_both_are_legible(browser, full_report):
    colours = {}
    for scheme in ("light", "dark"):
        browser.open(full_report, width=1280, scheme=scheme)
        colours[scheme] = browser.evaluate(
            "(() => { const body = getComputedStyle(document.body); return [body.color, body.backgroundColor, "
            "getComputedStyle(document.querySelector('svg.chart .ink')).fill]; })()"
        )
    assert colours["light"] == ["rgb(28, 33, 40)", "rgb(255, 255, 255)", "rgb(28, 33, 40)"]
    assert colours["dark"] == ["rgb(232, 236, 241)", "rgb(20, 24, 29)", "rgb(232, 236, 241)"]


def test_the_pointer_reveals_values(browser, full_report):
    browser.open(full_report, width=1280)
    place = browser.evaluate(
        "(() => { const svg = document.querySelector('#learning .wide svg'); svg.scrollIntoView({block: 'center', "
        "behavior: 'instant'}); const box = svg.getBoundingClientRect(); return [box.left + box.width / 2, box.top + "
        "box.height / 2]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    tip = browser.evaluate(
        "(() => { const tip = document.getElementById('tip'); return [tip.hidden, tip.innerText]; })()"
    )
    assert tip[0] is False
    assert tip[1].startswith("step ")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert browser.evaluate("document.getElementById('tip').hidden") is True
    assert browser.evaluate("document.querySelectorAll('.cursor').length") == 0
    assert browser.complaints() == []


def test_the_page_works_without_scripts(browser, full_report):
    browser.open(full_report, width=1280, scripts=False)
    size = browser.call("Page.getLayoutMetrics")["cssContentSize"]
    assert size["height"] > 3000
    assert size["width"] <= 1280


def test_hostile_ids_do_not_run(browser, run_folder):
    evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>" + "w" * 400
    users = json.loads((run_folder / "samples.json").read_text())["users"]
    for user in users:
        user["user"] = user["target"] = user["history"][0]["item"] = user["recommendations"][0]["item"] = evil
    (run_folder / "samples.json").write_text(json.dumps({"users": users}))
    browser.open(write_report(run_folder), width=390)
    assert browser.evaluate("window.hacked === undefined") is True
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.requests() == []
    assert "<script>" in browser.evaluate("document.querySelector('.sample').innerText")


def test_an_injected_script_would_be_stopped_by_the_policy(browser, full_report, tmp_path):
    page = tmp_path / "injected.html"
    page.write_text(full_report.read_text().replace("<main>", "<main><script>window.hacked = 1</script>"))
    browser.open(page, width=1280)
    assert browser.evaluate("window.hacked === undefined") is True
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


def test_a_run_that_has_just_begun_fits_too(browser, run_folder):
    for name in ("metrics.jsonl", "evaluation.json", "samples.json"):
        (run_folder / name).unlink()
    browser.open(write_report(run_folder), width=390)
    keep_picture(browser, "report-begun")
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert "not evaluated yet" in browser.evaluate("document.querySelector('h1').innerText")
