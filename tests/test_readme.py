"""The README's figures and picture are those of the records in docs/results."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import turbogr

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool():
    """tools/headline.py as a module."""
    spec = importlib.util.spec_from_file_location("headline", ROOT / "tools" / "headline.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def headline(tool):
    return tool.Headline.read()


def with_figure(headline, name, key, factor):
    """The headline with one figure of one record multiplied."""
    record = headline.records[name]
    figures = {**record.figures, key: record.figures[key] * factor}
    return dataclasses.replace(
        headline, records={**headline.records, name: dataclasses.replace(record, figures=figures)}
    )


def test_the_table_is_that_of_the_records(tool, headline):
    assert tool.replace_block(README, headline.table()) == README, "run `make format`"


def test_the_picture_is_that_of_the_records(tool, headline):
    assert tool.PICTURE.read_text(encoding="utf-8") == headline.picture() + "\n", "run `make format`"
    assert "docs/headline.svg" in README


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train", "ml1m_tokens_per_second"),
        ("train", "ml1m_rectools_tokens_per_second"),
        ("train", "ml1m_reference_peak_memory_bytes"),
        ("train", "d256_reference_tokens_per_second"),
        ("prepare", "pandas_events_per_second_1m"),
        ("prepare", "events_per_second_10m"),
        ("train", "d256_peak_memory_bytes"),
    ],
)
def test_another_measurement_changes_the_table(headline, name, key):
    assert with_figure(headline, name, key, 0.8).table() != headline.table()


@pytest.mark.parametrize("sweep", ["quality", "quality-random-ties"])
def test_other_hit_rates_change_the_table(headline, sweep):
    rates = {**headline.hit_rates, sweep: [rate + 0.001 for rate in headline.hit_rates[sweep]]}
    assert dataclasses.replace(headline, hit_rates=rates).table() != headline.table()


def test_a_comparison_that_is_lost_says_so(headline):
    assert "3.5×\u00a0slower" in headline.table()
    worse = with_figure(headline, "prepare", "events_per_second_10m", 0.25)
    assert "2.4×\u00a0slower" in worse.table()
    below = dataclasses.replace(headline, published=0.34)
    assert "−6.8\u00a0%" in below.table()


def test_the_table_is_short_and_has_a_comparison_that_is_lost(headline):
    rows = [line for line in headline.table().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    assert any("slower" in row for row in rows)


def test_a_readme_without_the_marks_is_refused(tool, headline):
    with pytest.raises(ValueError, match="no block between"):
        tool.replace_block("# A page without marks\n", headline.table())


def test_a_recipe_without_a_published_figure_is_refused(tool):
    with pytest.raises(ValueError, match="names no published"):
        tool.Headline.read(recipe=ROOT / "recipes" / "quickstart.yaml")


def test_the_first_screen_has_two_sentences_a_picture_a_table_and_the_commands():
    screen = README.partition("\n## ")[0]
    paragraph = screen.split("\n\n")[1]
    assert len(re.findall(r"\.(?:\s|$)", paragraph)) == 2
    order = ["![", "| measured |", "make demo", "turbogr prepare csv"]
    places = [screen.index(part) for part in order]
    assert places == sorted(places)


def test_the_functions_of_the_python_example_exist():
    block = re.search(r"```python\n(.*?)```", README, re.S)[1]
    compile(block, "README.md", "exec")
    called = re.findall(r"turbogr\.(\w+)\(", block)
    assert called
    assert set(called) <= set(turbogr.__all__)
