"""The figures of docs/results/first-result.md follow from the two records beside it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from turbogr.bench.record import Record
from turbogr.evaluation.baseline_titles import TITLES

RESULTS = Path(__file__).parents[1] / "docs/results"
PAGE = (RESULTS / "first-result.md").read_text(encoding="utf-8")
METHODS = ("popularity", "markov", "recent-items", "item-knn", "session-knn", "skip-markov", "ease", "ease-recency")


@pytest.fixture(scope="module", params=["first-result.json", "first-result-earlier.json"])
def record(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def figures(record: str) -> dict[str, float]:
    return Record.read(RESULTS / record).figures


@pytest.fixture(scope="module")
def section(record: str) -> str:
    """The part of the page that links to the record."""
    (found,) = (part for part in PAGE.split("\n## ") if f"[record]({record})" in part)
    return found


def logs(figures: dict[str, float]) -> list[str]:
    """The logs by name; the subsets of a set follow one another by size."""
    names = [key.removesuffix("_ratio_hr") for key in figures if key.endswith("_ratio_hr") and key != "mean_ratio_hr"]
    return sorted(names, key=lambda name: (family(name), figures[f"{name}_users"]))


def family(log: str) -> str:
    return re.sub(r"-\d+$", "", log)


def row(figures: dict[str, float], log: str) -> str:
    """The page's line of a log."""

    def of(key: str) -> float:
        return figures[f"{log}_{key}"]

    best = max((name for name in METHODS if f"{log}_{name}_hr" in figures), key=lambda name: of(f"{name}_hr"))
    cells = [log, *(f"{of(key):,.0f}" for key in ("users", "items", "events"))]
    cells += [f"{TITLES[best]} {of(f'{best}_hr'):.4f}", f"{of('model_hr'):.4f}", f"{of('delivered_hr'):.4f}"]
    cells += [f"{of('ratio_hr'):.2f}", f"{of('ratio_ndcg'):.2f}"]
    cells += [f"{of('margin_hr'):+.1f}", f"{of('margin_ndcg'):+.1f}"]
    return f"| {' | '.join(cells)} |"


def test_every_log_has_its_line(figures: dict[str, float], section: str) -> None:
    shown = [line for line in section.splitlines() if re.match(r"\| [a-z0-9]+(-\d+)? \| [\d,]+ \|", line)]
    assert shown == [row(figures, log) for log in logs(figures)]


def test_the_means_and_the_worst_margin_are_those_of_the_lines(figures: dict[str, float], section: str) -> None:
    names = logs(figures)
    assert figures["num_logs"] == len(names)
    for short in ("hr", "ndcg"):
        families = {family(log) for log in names}
        means = [np.mean([figures[f"{log}_ratio_{short}"] for log in names if family(log) == one]) for one in families]
        assert figures[f"mean_ratio_{short}"] == pytest.approx(np.mean(means))
        assert f"{figures[f'mean_ratio_{short}']:.3f}" in section
        for log in names:
            best = max(figures[f"{log}_{name}_{short}"] for name in METHODS if f"{log}_{name}_{short}" in figures)
            assert figures[f"{log}_ratio_{short}"] == pytest.approx(figures[f"{log}_delivered_{short}"] / best)
    margins = [figures[f"{log}_margin_{short}"] for log in names for short in ("hr", "ndcg")]
    assert figures["worst_margin"] == pytest.approx(min(margins))
    below = sum(min(figures[f"{log}_margin_{short}"] for short in ("hr", "ndcg")) < -1 for log in names)
    assert f"{below} of {len(names)} logs" in section
