"""From nothing to the report, by the command line and by Python; both say the same."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

import turbogr as api
from tests.end_to_end.tiny import TINY, train_arguments
from turbogr import cli

METRICS = {"hr@10", "ndcg@10", "hr@50", "ndcg@50", "hr@200", "ndcg@200", "mrr"}


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    """A copy of the run with its evaluation."""
    copy = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(run, copy)
    assert cli.main(["evaluate", str(copy)]) == 0
    return copy


def test_the_run_folder_is_complete(run):
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["finished"] >= record["created"]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["machine"]["gemm_peak_flops"] == 1e11
    assert json.loads((run / "summary.json").read_text())["metrics"].keys() >= METRICS
    assert api.load_config(run / "config.yaml").model.max_len == 16
    kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(kinds) == {"train", "eval"}
    assert kinds.count("eval") == 2


def test_evaluate_writes_what_it_prints(turbogr, evaluated, tmp_path):
    status, out, _ = turbogr("evaluate", evaluated, "--json", tmp_path / "result.json")
    assert status == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == json.loads((evaluated / "evaluation.json").read_text())
    measured = result["parts"]["test"]
    assert measured.keys() - {"delivered"} == {"model", "popularity", "markov"}
    assert all(values.keys() >= METRICS for values in measured.values())
    assert f"{measured['model']['ndcg@10']:.4f}" in out
    assert result["protocol"] in out
    users = json.loads((evaluated / "samples.json").read_text())["users"]
    assert users
    assert all(len(user["recommendations"]) == 10 for user in users)


def test_the_batch_size_changes_no_digit(turbogr, evaluated, tmp_path):
    results = []
    for size in (1, 7, 1000):
        assert turbogr("evaluate", evaluated, "--batch-size", size, "--json", tmp_path / "result.json")[0] == 0
        results.append(json.loads((tmp_path / "result.json").read_text())["parts"]["test"])
    assert results[0] == results[1] == results[2]


def test_recommend_writes_the_same_in_every_format(turbogr, store, run, tmp_path):
    for ending in ("csv", "parquet", "jsonl"):
        assert turbogr("recommend", run, "--k", 5, "--out", tmp_path / f"out.{ending}")[0] == 0
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    names = ("user_id", "item_id", "rank")
    assert [tuple(str(row[name]) for name in names) for row in table] == [tuple(row[n] for n in names) for row in rows]
    assert [tuple(row[name] for name in names) for row in table] == [tuple(row[n] for n in names) for row in lines]
    assert len(table) == 5 * api.Store.open(store).num_users
    assert [row["rank"] for row in table[:5]] == [1, 2, 3, 4, 5]


def test_the_report_is_one_page(turbogr, evaluated):
    status, out, _ = turbogr("report", evaluated)
    assert status == 0
    page = (evaluated / "report.html").read_text(encoding="utf-8")
    assert "report.html" in out
    assert "popularity" in page.lower()
    assert 'src="http' not in page


def test_python_does_what_the_commands_do(store, run, evaluated, tmp_path):
    again = api.train(run / "config.yaml", store, tmp_path / "run")
    assert again.status == "finished"
    measured = api.evaluate(tmp_path / "run")
    saved = json.loads((evaluated / "evaluation.json").read_text())
    test = saved["parts"]["test"]
    assert measured.model_metrics == test["model"]
    assert measured.metrics == test.get("delivered", test["model"])
    assert measured.baselines == {name: saved["parts"]["test"][name] for name in ("popularity", "markov")}
    assert measured.num_users == saved["num_users"]
    assert Path(api.write_report(tmp_path / "run")).is_file()


def test_overrides_from_python(store, tmp_path):
    result = api.train(
        Path(__file__).parents[2] / "recipes" / "quickstart.yaml",
        store,
        tmp_path / "run",
        overrides=[*TINY, "train.epochs=", "train.steps=3"],
    )
    assert result.step == 3


def test_someone_new_gets_recommendations(run):
    recommender = api.load(run)
    known = [recommender.store.item_ids.decode([row])[0] for row in range(4)]
    history = [(item, 1_650_000_000 + 60 * place) for place, item in enumerate(known)]
    (found,) = recommender.recommend([history], k=10, filter_seen=True)
    assert len(found) == 10
    assert not {item for item, _ in found} & set(known)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


def test_an_own_log_in_three_commands(turbogr, tmp_path):
    log = tmp_path / "log.csv"
    rows = [(f"user {u}", f"item {(u * s) % 23}", 1_600_000_000 + 3600 * s) for u in range(40) for s in range(1, 9)]
    log.write_text("user_id,item_id,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    assert turbogr("prepare", "csv", log, "--out", tmp_path / "data")[0] == 0
    assert turbogr(*train_arguments(tmp_path / "data", tmp_path / "run"))[0] == 0
    assert turbogr("recommend", tmp_path / "run", "--k", 3, "--out", tmp_path / "out.csv")[0] == 0
    assert (tmp_path / "out.csv").read_text().count("\n") == 1 + 3 * 40
