"""A run delivers what is best on validation: training, files, `evaluate`, `recommend`, and runs of earlier releases."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

import turbogr
from tests.simple import plain
from tests.stores import write_store
from turbogr import cli, machine
from turbogr.api import evaluate
from turbogr.config import (
    Config,
    DataConfig,
    DeliverConfig,
    EvaluateConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from turbogr.data.split import Split
from turbogr.errors import UserError
from turbogr.evaluation.evaluator import evaluate as measure
from turbogr.evaluation.item_ranking import top_k
from turbogr.evaluation.job_pool import Interrupted
from turbogr.evaluation.user_positions import UserPositions
from turbogr.jagged import Jagged
from turbogr.runs import open_run
from turbogr.simple import ease
from turbogr.simple.delivery import DELIVERED, Delivered
from turbogr.simple.methods import METHODS
from turbogr.simple.training_events import TrainingEvents
from turbogr.tasks.retrieval import RetrievalTask
from turbogr.training.run import train

NUM_ITEMS = 60
BASELINES = ("popularity", "markov", "skip-markov", "ease")


@pytest.fixture(scope="module", autouse=True)
def _no_peak_measurement():
    patch = pytest.MonkeyPatch()
    patch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A log in which item i is followed by i + 7, which a model that hardly trains does not learn."""
    starts = np.random.default_rng(1).integers(0, NUM_ITEMS, 120)
    logs = [[int(start + 7 * place) % NUM_ITEMS for place in range(6)] for start in starts]
    return write_store(tmp_path_factory.mktemp("store") / "data", logs, NUM_ITEMS)


def make_config(**evaluation):
    options = {"every": 1, "baselines": BASELINES, **evaluation}
    return Config(
        model=ModelConfig(dim=16, num_blocks=1, num_heads=2, max_len=16),
        loss=LossConfig(num_negatives=8),
        optimizer=OptimizerConfig(lr=1e-5),
        data=DataConfig(batch_size=64),
        evaluate=EvaluateConfig(**options),
        deliver=DeliverConfig("best"),
        train=TrainConfig(epochs=1, tensorboard=False),
    )


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    train(make_config(), store.path, out)
    return out


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def fitted(run, store):
    """What delivered.json describes, fitted here; it has the simple method alone or first."""
    delivered = Delivered.read(run, "hstu")
    assert [component.name for component in delivered.components] == ["skip-markov"]
    split = Split.of(store)
    return METHODS["skip-markov"].fit(TrainingEvents.of(store, split), delivered.components[0].settings)


def test_the_summary_has_the_metrics_of_what_is_delivered_and_the_models_own(run, store):
    summary = summary_of(run)
    assert summary["delivered"] == "Markov chain over skips"
    expected = measure(fitted(run, store), store, Split.of(store), "test", ks=(10, 50, 200))
    assert summary["metrics"] == expected.metrics == summary["baselines"]["skip-markov"]
    assert summary["standard_errors"] == expected.standard_errors
    assert summary["metrics_exclude_seen"] == expected.metrics_exclude_seen
    assert summary["metrics_include_seen"] == expected.metrics_include_seen
    assert summary["model_metrics"].keys() == summary["metrics"].keys() == summary["model_standard_errors"].keys()
    assert summary["model_metrics"]["hr@10"] < summary["metrics"]["hr@10"]
    assert list(summary["baselines"]) == list(BASELINES) and summary["baselines_refused"] == {}
    by_user = UserPositions.read(run, "test", summary["step"])
    assert list(by_user.positions) == ["delivered", "model", *BASELINES]
    assert by_user.positions["delivered"].tolist() == expected.positions.tolist()


def test_evaluate_measures_the_same_and_prints_it(run, store, tmp_path, capfd):
    copy = shutil.copytree(run, tmp_path / "run")
    assert cli.main(["evaluate", str(copy)]) == 0
    out = capfd.readouterr().out
    assert out.split()[:3] == ["delivered", "hstu", "popularity"]
    assert "Delivered is Markov chain over skips, chosen on the validation items" in out
    parts = json.loads((copy / "evaluation.json").read_text())["parts"]["test"]
    summary = summary_of(run)
    assert (parts["delivered"], parts["model"]) == (summary["metrics"], summary["model_metrics"])
    found = evaluate(run)
    assert found.delivered == "Markov chain over skips"
    assert (found.metrics, found.model_metrics) == (summary["metrics"], summary["model_metrics"])


@pytest.mark.parametrize("filter_seen", [None, False])
def test_recommend_gives_the_lists_of_what_is_delivered(run, store, filter_seen):
    model = turbogr.load(run)
    users = list(range(100, 220))
    lists = model.recommend(users, k=5, filter_seen=filter_seen, output="lists")
    logs = [store.items[store.offsets[u] : store.offsets[u + 1]].tolist() for u in range(store.num_users)]
    seen = Jagged.from_lengths(
        torch.tensor([item for log in logs for item in log]), torch.tensor([len(log) for log in logs])
    )
    scores = fitted(run, store).score(plain.given(logs), lambda _: None)
    best, rows = top_k(scores, 5, None if filter_seen is False else seen)
    expected = [
        [(f"item-{row:03d}", score) for row, score in zip(rows[user].tolist(), best[user].tolist(), strict=True)]
        for user in range(len(users))
    ]
    assert lists == expected
    new = model.recommend([["item-003", "item-010"]], k=1, output="lists")
    assert new[0][0][0] == "item-017"


def test_samples_and_coverage_are_of_what_is_delivered(run, store):
    users = json.loads((run / "samples.json").read_text())["users"]
    positions = {
        int(user): int(position)
        for user, position in zip(
            range(store.num_users),
            measure(fitted(run, store), store, Split.of(store), "test").positions,
            strict=True,
        )
    }
    assert users
    for user in users:
        assert user["target_rank"] == positions[int(user["user"]) - 100]


def test_a_run_without_delivered_json_delivers_its_model(run, store, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / DELIVERED).unlink()
    opened = open_run(copy)
    assert opened.delivered == "hstu"
    found = evaluate(copy)
    assert found.metrics == found.model_metrics == summary_of(run)["model_metrics"]


def test_the_model_is_delivered_where_the_config_says_so(store, tmp_path):
    out = tmp_path / "run"
    train(dataclasses.replace(make_config(), deliver=DeliverConfig("model")), store.path, out)
    summary = summary_of(out)
    assert summary["delivered"] == "hstu" and summary["metrics"] == summary["model_metrics"]
    assert Delivered.read(out, "hstu").is_model


def test_a_baseline_that_does_not_exist_is_refused_with_the_one_that_was_meant():
    with pytest.raises(UserError, match=r"evaluate\.baselines names 'eaze'.*Did you mean.*ease"):
        make_config(baselines=("popularity", "eaze")).check()


def train_command(store, out, *settings):
    arguments = ["model.dim=16", "optimizer.lr=1e-5", "train.epochs=1", "train.tensorboard=false", "model.max_len=16"]
    arguments += ["evaluate.baselines=[popularity,ease,ease-recency,skip-markov]", *settings]
    command = ["train", "quickstart", "--data", str(store.path), "--out", str(out)]
    return command + [part for setting in arguments for part in ("--set", setting)]


def test_train_says_what_is_delivered_and_why_and_what_was_refused(store, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(ease, "MAX_ITEMS", 20)
    assert cli.main(train_command(store, tmp_path / "run")) == 0
    out = capfd.readouterr().out
    values = Delivered.read(tmp_path / "run", "hstu").values
    best, model = (f"{values[name]:.4f}" for name in ("Markov chain over skips", "hstu"))
    why = f"best on the validation items with {best} (mean of NDCG@10 and NDCG@100); hstu has {model}."
    assert f"Delivered: Markov chain over skips, {why}\n" in out
    assert "Not compared with EASE and EASE with recency: EASE needs a number for every pair of items" in out
    refused = summary_of(tmp_path / "run")["baselines_refused"]
    assert list(refused) == ["ease", "ease-recency"] and "60 items" in refused["ease"]
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
    assert "Not compared with EASE and EASE with recency" in capfd.readouterr().out


def test_train_says_nothing_of_a_choice_that_was_not_made(store, tmp_path, capfd):
    assert cli.main(train_command(store, tmp_path / "run", "deliver.choose=model")) == 0
    assert "Delivered" not in capfd.readouterr().out


def test_choosing_what_to_deliver_can_be_interrupted(run, store):
    opened = open_run(run)
    task = opened.task
    assert isinstance(task, RetrievalTask)
    with pytest.raises(Interrupted):
        task.deliver(opened.tables, opened.store, opened.split, should_stop=lambda: True)
    with pytest.raises(Interrupted):
        task.measure_baselines(opened.store, opened.split, "test", should_stop=lambda: True)


def test_a_run_that_was_interrupted_while_it_chose_ends_when_resumed(store, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def interrupted(*args, **options):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(RetrievalTask, "deliver", interrupted)
        assert train(make_config(), store.path, out).status == "interrupted"
    assert not (out / "summary.json").exists() and not (out / DELIVERED).exists()
    train(make_config(), store.path, out, resume=True)
    assert summary_of(out)["delivered"] == "Markov chain over skips" and (out / DELIVERED).exists()
