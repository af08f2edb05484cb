"""bench first_result: subsets, runs that are not repeated, and the figures against their definition."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.stores import draw_histories, write_store
from turbogr.bench import first_result, run_benchmark
from turbogr.bench.first_result import LogResult
from turbogr.data.store import Store
from turbogr.errors import UserError

FAST = ["model.dim=8", "train.epochs=1", "evaluate.baselines=[popularity,item-knn]", "train.log_every=100"]


def test_it_trains_every_log_once_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "log", draw_histories(3, num_users=60, num_items=20), 20)
    assignments = [f"stores=['{store.path}']", "users=[30]", "seeds=[0]", f"out={tmp_path / 'out'}", f"set={FAST}"]
    record, result = run_benchmark("first_result", assignments)
    assert [row[0] for row in result.tables[0].rows] == ["log", "log-30"]
    assert Store.open(tmp_path / "out" / "data" / "log-30").num_users == 30
    summary = json.loads((tmp_path / "out" / "runs" / "log" / "seed-0" / "summary.json").read_text())
    best = max(system["hr@10"] for system in summary["baselines"].values())
    assert record.figures["log_ratio_hr"] == pytest.approx(summary["metrics"]["hr@10"] / best)
    mean = np.mean([record.figures["log_ratio_hr"], record.figures["log-30_ratio_hr"]])
    assert record.figures["mean_ratio_hr"] == pytest.approx(mean), "a log and its subsets count as one"

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(first_result.subprocess, "run", never)
    again, _ = run_benchmark("first_result", assignments)
    assert again.figures == record.figures


def make_result(name: str, family: str, ours: float, best: float, error: float, events: int = 10) -> LogResult:
    store: Any = SimpleNamespace(num_events=events, num_users=5, num_items=4)
    values = {"hr": ours, "ndcg": ours}
    baselines = {short: {"ease": best, "popularity": best / 2} for short in values}
    return LogResult(name, family, store, ["hstu"], values, values, baselines, {"hr": error, "ndcg": 2 * error}, 7.0)


def test_the_figures_follow_their_definition() -> None:
    results = [make_result("a", "a", 0.2, 0.1, 0.1), make_result("a-5", "a", 0.1, 0.1, 0.1)]
    results.append(make_result("b", "b", 0.09, 0.1, 0.02, events=10**6))
    figures = first_result.figures(results)
    assert figures["mean_ratio_hr"] == pytest.approx((1.5 + 0.9) / 2)
    assert figures["worst_margin"] == pytest.approx(-0.5)
    assert figures["most_seconds"] == 7.0 and figures["num_logs"] == 3
    assert (
        figures["b_ease_hr"] == 0.1
        and figures["b_popularity_ndcg"] == 0.05
        and figures["b_margin_hr"] == pytest.approx(-0.5)
    )
    assert figures["b_events"] == 10**6 and figures["b_delivered_hr"] == figures["b_model_hr"] == 0.09
    assert "most_seconds" not in first_result.figures(results, timed=False)


def test_without_stores_it_says_what_to_name() -> None:
    with pytest.raises(UserError, match="stores="):
        run_benchmark("first_result", [])


def test_large_logs_can_be_left_out(tmp_path: Path) -> None:
    store = write_store(tmp_path / "log", draw_histories(3, num_users=60, num_items=20), 20)
    assignments = [f"stores=['{store.path}']", "users=[30]", "seeds=[0]", f"out={tmp_path / 'out'}", f"set={FAST}"]
    most = store.num_events - 1
    _, result = run_benchmark("first_result", [*assignments, f"most_events={most}"])
    assert [row[0] for row in result.tables[0].rows] == ["log-30"]
    _, result = run_benchmark("first_result", [*assignments, "logs=['log-30']"])
    assert [row[0] for row in result.tables[0].rows] == ["log-30"]
    with pytest.raises(UserError, match="log-31"):
        run_benchmark("first_result", [*assignments, "logs=['log-31']"])
    with pytest.raises(UserError, match="most_events=3"):
        run_benchmark("first_result", [*assignments, "most_events=3"])


def test_a_failed_training_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path / "log", draw_histories(3, num_users=60, num_items=20), 20)
    assignments = [f"stores=['{store.path}']", "users=[]", "seeds=[0]", f"out={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=r"no\.such"):
        run_benchmark("first_result", [*assignments, "set=['no.such=1']"])
