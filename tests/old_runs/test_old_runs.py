"""A run folder written by TurboGR 0.1.0 opens: it is measured, recommends, continues and starts others as in 0.1.0.

TURBOGR_TEST_OLD_RUNS is a folder that has the run and its data under `0.1.0/run` and `0.1.0/data`. The expected values
were written by 0.1.0 itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from turbogr import cli
from turbogr.runs import MetricLog, RunFolder

ROOT = os.environ.get("TURBOGR_TEST_OLD_RUNS")

pytestmark = pytest.mark.skipif(
    ROOT is None, reason="TURBOGR_TEST_OLD_RUNS is not set: it names the folder of runs written by earlier releases"
)

LISTS_SHA256 = "15ee546b93751d44d80e0b3936a06d6884642d9a7364ab1d0c05948c1a7140d5"  # of all users' ten best items
LISTS = {
    0: [2054, 706, 1649, 1046, 913, 2072, 718, 1719, 1226, 399],
    1500: [1218, 77, 1936, 205, 2064, 2426, 49, 2108, 795, 1808],
    3000: [1781, 640, 2499, 50, 2627, 1358, 1342, 2750, 891, 2895],
    4500: [1563, 1798, 1046, 2340, 657, 104, 1669, 1158, 2299, 399],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable copy of the run; the current folder is its parent, because run.json has the relative path `data`."""
    assert ROOT is not None
    source = Path(ROOT) / "0.1.0"
    shutil.copytree(source, tmp_path / "old", copy_function=shutil.copyfile)
    for folder, _, files in os.walk(tmp_path / "old"):
        for path in (Path(folder), *(Path(folder) / name for name in files)):
            path.chmod(0o755)
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old" / "run"


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in MetricLog.read(run).training}


def test_evaluate_gives_the_same_metrics(run: Path, tmp_path: Path) -> None:
    expected = json.loads((run / "evaluation.json").read_text())
    assert cli.main(["evaluate", str(run), "--json", str(tmp_path / "result.json")]) == 0
    measured = json.loads((tmp_path / "result.json").read_text())
    assert measured["parts"].keys() == expected["parts"].keys()
    for part, systems in expected["parts"].items():
        # Later releases compare with more methods; what 0.1.0 measured stays.
        # The kernels round otherwise than 0.1.0's, which may swap items of equal scores up to rounding.
        for name, metrics in systems.items():
            assert measured["parts"][part][name] == pytest.approx(metrics, rel=0, abs=1e-7)
    assert (measured["step"], measured["epoch"]) == (expected["step"], expected["epoch"])
    assert (measured["num_users"], measured["skipped"]) == (expected["num_users"], expected["skipped"])


def test_recommend_gives_the_same_lists(run: Path, tmp_path: Path) -> None:
    assert cli.main(["recommend", str(run), "--out", str(tmp_path / "lists.jsonl")]) == 0
    lists: dict[int, list[int]] = {}
    for line in (tmp_path / "lists.jsonl").read_text().splitlines():
        entry = json.loads(line)
        lists.setdefault(entry["user_id"], []).append(entry["item_id"])
    assert {user: lists[user] for user in LISTS} == LISTS
    content = json.dumps([[user, lists[user]] for user in sorted(lists)])
    assert hashlib.sha256(content.encode()).hexdigest() == LISTS_SHA256


def test_training_continues(run: Path) -> None:
    earlier = (run / "metrics.jsonl").read_text()
    command = ["train", str(run / "config.yaml"), "--data", "data", "--out", str(run), "--resume"]
    assert cli.main([*command, "--set", "train.epochs=23", "--set", "train.tensorboard=false"]) == 0
    assert (run / "metrics.jsonl").read_text().startswith(earlier)
    assert RunFolder.open(run).record["status"] == "finished"
    assert max(losses(run)) == 1034 + 47
    # The loss shows whether the weights, the optimiser's state, the order of the batches and the negatives go on.
    assert losses(run)[1040] == pytest.approx(1.5088127829951221, rel=1e-5)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metrics"]["hr@10"] > 0.58


def test_another_run_starts_from_it(run: Path) -> None:
    warm = run.parent / "warm"
    command = ["train", str(run / "config.yaml"), "--data", "data", "--out", str(warm), "--init-from", str(run)]
    assert cli.main([*command, "--set", "train.epochs=1", "--set", "train.tensorboard=false"]) == 0
    assert losses(warm)[10] == pytest.approx(1.5366344858226868, rel=1e-5)
    (evaluation,) = MetricLog.read(warm).evaluations
    assert evaluation["ndcg@10"] == pytest.approx(0.4432, abs=0.005)


def test_it_can_be_reported(run: Path) -> None:
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "HSTU puts the next item in its top 10 for" in page
    assert "59.0 %" in page
    assert "Length of a user" in page
