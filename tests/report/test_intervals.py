"""Confidence intervals, results by user, groups of users and coverage in the report of one run."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pytest

from tests.report.test_page import parse, report
from turbogr.data.prepare.item_table import add_item_info
from turbogr.evaluation.metrics import MISSED, margin, paired_difference, ranking_metrics, standard_errors
from turbogr.evaluation.user_positions import UserPositions
from turbogr.report.page import render, write_report
from turbogr.report.run_data import RunData
from turbogr.report.user_groups import group_score, thirds

NAMES = ["popularity", "markov", "ease", "ease-recency", "item-knn", "skip-markov", "session-knn", "own", "<b>blend"]


def draw(seed: int, shift: float, num: int = 900) -> np.ndarray:
    rng = np.random.default_rng(seed)
    positions = np.clip(np.exp(rng.normal(3 + shift, 1.5, num)), 1, 700).astype(np.int64)
    positions[::40] = MISSED
    return positions


def measure(run, systems: dict[str, np.ndarray], step: int = 850, users: int = 900) -> UserPositions:
    """Write an evaluation with these positions of each system into a run folder, as `turbogr evaluate` does."""
    rng = np.random.default_rng(1)
    lengths, counts = rng.integers(3, 200, users), rng.integers(0, 500, users)
    by_user = UserPositions("test", step, np.arange(users), lengths, counts, dict(systems))
    by_user.write(run)
    metrics = {name: ranking_metrics(positions) for name, positions in systems.items()}
    errors = {name: standard_errors(positions, metrics[name]) for name, positions in systems.items()}
    record = json.loads((run / "evaluation.json").read_text())
    coverage = {"test": {"k": 10, "num_shown": 350, "num_items": 700, "num_users": users}}
    record |= {"step": step, "parts": {"test": metrics}, "standard_errors": {"test": errors}, "coverage": coverage}
    (run / "evaluation.json").write_text(json.dumps(record))
    return by_user


@pytest.fixture
def measured(run_folder):
    by_user = measure(run_folder, {"model": draw(0, -1), "popularity": draw(1, 1), "markov": draw(2, 0)})
    return run_folder, by_user


def test_every_metric_has_its_interval(measured):
    run, by_user = measured
    html = re.sub(r"\s+", " ", write_report(run).read_text(encoding="utf-8"))
    for positions in by_user.positions.values():
        metrics = ranking_metrics(positions)
        for name, error in standard_errors(positions, metrics).items():
            assert f"{metrics[name]:.4f} <small>± {margin(error, 900):.4f}</small>" in html
    text = parse(html).text
    value = ranking_metrics(by_user.positions["model"])["hr@10"]
    half = margin(standard_errors(by_user.positions["model"], ["hr@10"])["hr@10"], 900)
    assert f"95 % confidence interval: {100 * (value - half):.1f} % to {100 * (value + half):.1f} %" in text
    assert "± is a 95 % confidence interval" in text


def test_differences_are_those_user_by_user(measured):
    run, by_user = measured
    text = report(run).text
    value, error = paired_difference(by_user.positions["model"], by_user.positions["markov"], "hr@10")
    assert f"+{value:.4f} ± {margin(error, 900):.4f}" in text
    assert "may be chance over" not in text


def test_a_lead_within_the_noise_is_called_that(run_folder):
    positions = draw(0, 0)
    other = positions.copy()
    # Two users more and one fewer among the first ten: ahead, but by chance as likely as not.
    inside, outside = np.flatnonzero(positions == 5), np.flatnonzero(positions == 30)
    other[inside[:2]], other[outside[0]] = 40, 1
    measure(run_folder, {"model": positions, "markov": other})
    assert "Its lead in HR@10 may be chance over a Markov chain (+0.0011 ± " in report(run_folder).text


def test_positions_of_another_rule_are_not_used(measured):
    run, _ = measured
    record = json.loads((run / "evaluation.json").read_text())
    record["parts"]["test"]["model"]["hr@10"] += 0.01
    (run / "evaluation.json").write_text(json.dumps(record))
    text = report(run).text
    assert "difference" not in text and "rare: up to" not in text
    assert "± is a 95 % confidence interval" in text, "standard errors are beside the metrics"


def test_groups_have_bounds_users_and_metrics(measured):
    run, by_user = measured
    text = report(run).text
    for values, words in (
        (by_user.target_counts, ("rare: up to {} training events", "popular: {} or more")),
        (by_user.history_lengths, ("short: up to {} events", "long: {} or more")),
    ):
        low, middle, high = thirds(values)
        assert low.num_users + middle.num_users + high.num_users == 900
        for group, name in ((low, words[0].format(low.high)), (high, words[1].format(high.low))):
            hits = by_user.positions["model"][group.chosen] <= 10
            assert f"{name} {group.num_users} {hits.mean():.4f} ± " in text
            assert group_score(by_user, group, "model", "hr@10").value == pytest.approx(hits.mean())
        assert f"medium: {middle.low} to {middle.high} {middle.num_users}" in text
    assert "Coverage: 50.0 % of the catalogue (350 of 700 items) is in the top 10 of at least one of 900" in text


def test_thirds_keep_equal_values_together():
    groups = thirds(np.array([1] * 8 + [2, 3, 4]))
    assert [(group.low, group.high, group.num_users) for group in groups] == [(1, 1, 8), (2, 4, 3)]
    assert [(g.low, g.high, g.num_users) for g in thirds(np.array([7, 7]))] == [(7, 7, 2)]
    assert [g.num_users for g in thirds(np.arange(9))] == [3, 3, 3]


def test_an_old_run_has_neither_intervals_nor_groups(run_folder):
    text = report(run_folder).text
    assert "±" not in text and "Who it works for" not in text and "Coverage" not in text
    assert "0.3142" in text


def test_nine_baselines_and_no_empty_cell(run_folder):
    systems = {"model": draw(0, 0), **{name: draw(k + 1, 0.2 * k - 0.6) for k, name in enumerate(NAMES)}}
    measure(run_folder, systems)
    html = write_report(run_folder).read_text(encoding="utf-8")
    tree = parse(html)
    assert "<b>blend" in tree.text and "and 6 other simple methods" in tree.text
    assert not re.findall(r"<t[dh][^>]*>\s*</t[dh]>", html)
    assert not re.findall(r"<dd[^>]*>\s*(?:—\s*)?</dd>", html)
    table = re.search(r'aria-label="On the test items of 900 users".*?</table>', html, re.S)[0]
    values = [float(cell) for cell in re.findall(r"<th scope=\"row\">.*?<td[^>]*>([\d.]+)", table, re.S)]
    assert values[1:] == sorted(values[1:], reverse=True) and len(values) == 10, "the best baseline comes first"


def test_the_order_of_sections_is_what_a_newcomer_asks(measured):
    tree = report(measured[0])
    links = [attributes["href"] for tag, attributes in tree.found if tag == "a" and attributes["href"] != "#result"]
    expected = ["recommendations", "metrics", "groups", "learning", "data", "settings", "machine", "speed"]
    assert list(dict.fromkeys(links)) == [f"#{name}" for name in expected]
    facts = tree.text[: tree.text.index("The histories of")]
    assert "MFU" not in facts and "tokens/s" not in facts


def test_nominal_mfu_waits_behind_a_click(measured):
    html = write_report(measured[0]).read_text(encoding="utf-8")
    assert html.index("<summary>Nominal MFU") < html.index("Nominal model FLOPs utilisation")
    before = html[: html.index("<summary>Nominal MFU")]
    assert "Nominal" not in parse_text(before)


def parse_text(html: str) -> str:
    return re.sub(r"<[^>]*>", " ", re.sub(r"<(style|script).*?</\1>", "", html, flags=re.S))


def test_titles_stand_beside_ids(measured, store):
    run, _ = measured
    samples = json.loads((run / "samples.json").read_text())
    item = samples["users"][0]["recommendations"][0]["item"]
    info = add_item_info(store, pa.table({"item": [item], "title": ["Heat <i>1995</i>"]}))
    try:
        assert f"Heat <i>1995</i> {item}" in report(run).text
    finally:
        info.path.unlink()
    assert "Heat" not in report(run).text
    samples["users"][0]["recommendations"][0]["title"] = "Heat from the file"
    (run / "samples.json").write_text(json.dumps(samples))
    assert f"Heat from the file {item}" in report(run).text, "also where the store is gone"


def test_damaged_item_info_is_named(measured, store):
    path = store.path / "item_info.parquet"
    path.write_bytes(b"no")
    try:
        text = parse(render(RunData.read(measured[0]))).text
        assert "item_info.parquet is damaged" in text and "Length of a user's history" in text
    finally:
        path.unlink()


def test_the_page_says_what_mfu_is_a_share_of(measured):
    run, _ = measured
    former = parse_text(write_report(run).read_text(encoding="utf-8"))
    assert "fastest matrix product, as was usual when this run was made (181 GFLOP/s)" in " ".join(former.split())
    info = json.loads((run / "run.json").read_text())
    info["machine"] |= {"peak_flops": 3e11, "fma_peak_flops": 3e11, "gemm_peak_flops": 2e11}
    (run / "run.json").write_text(json.dumps(info))
    now = parse_text(write_report(run).read_text(encoding="utf-8"))
    assert "computes at most (fused multiply-adds, 300 GFLOP/s)" in " ".join(now.split())
