from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from turbogr.api import evaluate
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.evaluation import evaluator
from turbogr.evaluation.metrics import ranking_metrics
from turbogr.evaluation.user_positions import UserPositions
from turbogr.tasks.retrieval import RetrievalTask
from turbogr.training.run import train


def test_the_summary_tells_what_the_best_checkpoint_is_worth(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, store.path, run)
    found = json.loads((run / "summary.json").read_text())
    measured = evaluate(run)
    assert measured.metrics.items() <= found["metrics"].items()
    assert all(values.items() <= found["baselines"][name].items() for name, values in measured.baselines.items())
    assert {f"{name}@{k}" for name in ("hr", "ndcg") for k in (1, 10, 50, 200)} <= found["metrics"].keys()
    assert (found["part"], found["status"], found["steps"], found["epochs"]) == ("test", "finished", 12, 3)
    assert measured.standard_errors.items() <= found["standard_errors"].items()
    for name, errors in measured.baseline_standard_errors.items():
        assert errors.items() <= found["baseline_standard_errors"][name].items()
    assert found["standard_errors"].keys() == found["metrics"].keys()
    by_user = UserPositions.read(run, "test", found["step"])
    assert by_user is not None and list(by_user.positions) == ["model", *found["baselines"]]
    assert ranking_metrics(by_user.positions["model"], ks=(1, 10, 50, 200)) == found["metrics"]
    assert 0 < found["coverage"]["num_shown"] <= found["coverage"]["num_items"] == store.num_items
    samples = json.loads((run / "samples.json").read_text())
    assert samples["step"] == found["step"] and samples["users"]
    assert found["selected_on"] == "valid hr@10" and found["protocol"]["text"] == measured.protocol
    assert measured.protocol.endswith(", chosen by its hr@10 on the validation items")
    assert 0 < found["mfu_strict"] < found["mfu_nominal"]
    assert found["tokens_per_second"] > 0 and found["wall_seconds"] > 0 and found["peak_memory_bytes"] > 2**20
    environment = json.loads((run / "environment.json").read_text())
    assert environment["machine"]["gemm_peak_flops"] == 1e11
    assert environment["machine"]["peak_flops"] >= 1e11
    assert set(environment) == {"versions", "machine", "backends", "ranks"}


def test_a_sample_of_users_selects_and_stands_in_the_summary(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, users=9)), store.path, run)
    found, measured = json.loads((run / "summary.json").read_text()), evaluate(run)
    assert found["num_users"] == measured.num_users == 9
    assert (found["state"]["users"], found["state"]["users_seed"]) == (9, 0)
    assert "; a sample of 9 of the " in found["protocol"]["text"] and found["protocol"]["text"] == measured.protocol
    assert measured.metrics.items() <= found["metrics"].items()
    assert all(values.items() <= found["baselines"][name].items() for name, values in measured.baselines.items())
    by_user = UserPositions.read(run, "test", found["step"])
    assert by_user is not None and len(by_user.users) == 9
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {record["num_users"] for record in records if record["kind"] == "eval"} == {9}


@pytest.mark.parametrize("filter_seen", [True, False])
def test_the_summary_has_both_ways_to_treat_seen_items(
    config: Config, store: Store, tmp_path: Path, filter_seen: bool
) -> None:
    run = tmp_path / "run"
    train(
        dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, filter_seen=filter_seen)),
        store.path,
        run,
    )
    found = json.loads((run / "summary.json").read_text())
    assert found["protocol"]["seen"] == ("excluded" if filter_seen else "included")
    assert found["metrics"] == found["metrics_exclude_seen" if filter_seen else "metrics_include_seen"]
    assert found["metrics_exclude_seen"] != found["metrics_include_seen"], "some held-out items are repeats"
    assert found["baselines"] == found["baselines_exclude_seen" if filter_seen else "baselines_include_seen"]
    for name, way in (("metrics_exclude_seen", True), ("metrics_include_seen", False)):
        alone = evaluate(run, filter_seen=way)
        assert alone.metrics.items() <= found[name].items()
        assert getattr(alone, name) == alone.metrics
        for system, metrics in alone.baselines.items():
            assert metrics.items() <= found[name.replace("metrics", "baselines")][system].items()
        assert ("earlier items included" in alone.protocol) == (not way)
    assert evaluate(run).metrics.items() <= found["metrics"].items()


def test_a_summary_of_fewer_steps_does_not_survive(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, store.path, run)
    before = (run / "summary.json").stat().st_mtime_ns
    train(config, store.path, run, resume=True)
    assert (run / "summary.json").stat().st_mtime_ns == before
    cut_offs = dataclasses.replace(config.evaluate, ks=(5,), metric="ndcg@5")
    train(dataclasses.replace(config, evaluate=cut_offs), store.path, run, resume=True)
    assert "hr@5" in json.loads((run / "summary.json").read_text())["metrics"]
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4))
    train(longer, store.path, run, resume=True)
    assert json.loads((run / "summary.json").read_text())["steps"] == 16


def test_an_interrupted_summary_is_made_on_resume(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:

        def interrupted(*args: object, **kwargs: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            raise evaluator.Interrupted

        patch.setattr(RetrievalTask, "measure_baselines", interrupted)
        result = train(config, store.path, run)
    assert (result.status, result.signal) == ("interrupted", signal.SIGTERM)
    assert not (run / "summary.json").exists()
    assert train(config, store.path, run, resume=True).status == "finished"
    assert (run / "summary.json").exists()
