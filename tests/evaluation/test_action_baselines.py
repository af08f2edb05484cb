"""Baselines of ranking: counts without leakage, and methods that find what is there to find."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import optimize, sparse

from tests.stores import write_store
from turbogr.data.feature_columns import FeatureColumn, FeatureInfo
from turbogr.data.split import Split
from turbogr.data.vocabulary import Vocabulary
from turbogr.errors import UserError
from turbogr.evaluation import action_baselines
from turbogr.evaluation.action_baselines import BASELINES, boosted_trees, linear_methods, measure_action_baselines
from turbogr.evaluation.action_baselines.action_rows import action_rows
from turbogr.evaluation.action_baselines.running_sums import running_sums
from turbogr.evaluation.job_pool import Interrupted


@dataclass(frozen=True)
class Wanted:
    action: str | None = None
    kind: str = "binary"


CLICK = {"click": Wanted()}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(action_baselines, "_fits", {})


def write_log(path, seed=0, num_users=120, num_items=40, length=25, split="time:20000,24000", clicks=None):
    """A log where a click depends on the user's taste for the item's category, and a little on the item."""
    rng = np.random.default_rng(seed)
    category = rng.integers(0, 4, num_items)
    taste = rng.normal(0, 1.5, (num_users, 4))
    quality = rng.normal(0, 0.7, num_items)
    histories = rng.integers(0, num_items, (num_users, length))
    times = np.sort(rng.integers(0, 300, (num_users, length)) * 100, axis=1)
    users = np.repeat(np.arange(num_users), length)
    items = histories.reshape(-1)
    logits = taste[users, category[items]] + quality[items] - 0.5
    happened = (rng.random(len(items)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    seconds = (logits * 3 + rng.normal(0, 1, len(items))).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(np.arange(num_items) % 3)])
    features = [
        FeatureColumn("action.click", FeatureInfo("binary", high=1), happened if clicks is None else clicks(happened)),
        FeatureColumn("action.seconds", FeatureInfo("number", low=-9, high=9), seconds),
        FeatureColumn(
            "item.category", FeatureInfo("category", size=4), category.astype(np.int32), None, Vocabulary(np.arange(4))
        ),
        FeatureColumn(
            "item.tags",
            FeatureInfo("categories", size=5),
            rng.integers(0, 5, offsets[-1]).astype(np.int32),
            offsets,
            Vocabulary(np.arange(5)),
        ),
        FeatureColumn("event.delay", FeatureInfo("number", high=3), rng.integers(0, 4, len(items)).astype(np.float32)),
    ]
    return write_store(path, histories.tolist(), num_items, times=times.tolist(), split=split, features=features)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log") / "store")


def test_running_sums_are_those_of_earlier_rows_of_the_key():
    rng = np.random.default_rng(0)
    keys, moments, values = rng.integers(0, 5, 80), rng.integers(0, 12, 80), rng.integers(0, 9, (80, 3))
    found = running_sums(keys, moments, values)
    for row in range(80):
        before = (keys == keys[row]) & (moments < moments[row])
        np.testing.assert_array_equal(found[row], values[before].sum(0))
    assert running_sums(keys[:0], moments[:0], values[:0]).shape == (0, 3)


def test_a_row_depends_on_no_label_of_its_own_or_later_and_items_on_training_events_alone(tmp_path):
    before = write_log(tmp_path / "a")
    columns = ["item.category", "item.tags", "event.delay"]
    rows = action_rows(before, Split.of(before), CLICK, columns)
    rng = np.random.default_rng(1)
    tests = np.flatnonzero(np.asarray(before.times) >= 24000)
    changed = rng.choice(tests, len(tests) // 2, replace=False)

    def other(clicks):
        clicks = clicks.copy()
        clicks[changed] = 1 - clicks[changed]
        return clicks

    after = write_log(tmp_path / "b", clicks=other)
    again = action_rows(after, Split.of(after), CLICK, columns)
    earlier = np.asarray(before.times) < before.times[changed].min()
    np.testing.assert_array_equal(rows.numbers[earlier], again.numbers[earlier])
    of_user = [name.startswith(("events of user", "click of user", "click of newest")) for name in rows.number_names]
    same = np.array(of_user)
    np.testing.assert_array_equal(rows.numbers[:, ~same], again.numbers[:, ~same])
    assert (rows.numbers[:, same] != again.numbers[:, same]).any(), "the user's own history counts up to the request"
    for row in rng.choice(len(rows.users), 30):
        mine = (rows.users == rows.users[row]) & (rows.times < rows.times[row])
        assert rows.of_user.known["click"][row] == mine.sum()
        assert rows.of_user.sums["click"][row] == rows.labels["click"][mine].sum()
        item = np.asarray(before.items) == before.items[row]
        item[rows.times >= min(rows.times[row], 20000)] = False
        assert rows.of_item.sums["click"][row] == rows.labels["click"][item].sum()


def test_the_newest_events_of_a_user_are_strictly_earlier(store):
    rows = action_rows(store, Split.of(store), CLICK, [])
    newest = rows.numbers[:, rows.number_names.index("click of newest 10")]
    for row in range(0, 3000, 157):
        mine = np.flatnonzero((rows.users == rows.users[row]) & (rows.times < rows.times[row]))[-10:]
        expected = (rows.labels["click"][mine].sum() + rows.rates["click"]) / (len(mine) + 1)
        assert newest[row] == pytest.approx(expected, rel=1e-5)


def test_logistic_regression_is_the_minimum(store):
    rng = np.random.default_rng(0)
    rows = sparse.csr_matrix(np.c_[rng.normal(0, 1, (200, 4)), np.ones(200)].astype(np.float32))
    labels = (rng.random(200) < 0.4).astype(np.float64)
    problem = linear_methods.Problem.of(rows, labels, True, lambda: None)
    found = linear_methods.fit_linear(problem, 0.1)

    def loss(weights):
        scores = rows @ weights
        return np.mean(np.logaddexp(0, scores) - labels * scores) + 0.05 * weights[:-1] @ weights[:-1]

    expected = optimize.minimize(loss, np.zeros(5)).x
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_factorisation_machine_scores_as_its_definition_and_learns_pairs():
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 6, (2, 4000))
    one_hot = np.zeros((4000, 13), np.float32)
    one_hot[np.arange(4000), left] = one_hot[np.arange(4000), 6 + right] = one_hot[:, 12] = 1
    one_hot[:, 3] *= 0.5
    labels = ((left % 2) == (right % 2)).astype(np.float64)  # no weight of a single value tells it
    rows = sparse.csr_matrix(one_hot)
    problem = linear_methods.Problem.of(rows, labels, True, lambda: None)
    settings = linear_methods.FactorSettings(4, 0.1, 1e-6, batch_size=200)
    machine = linear_methods.FactorisationMachine(problem, settings, np.zeros(13), 0)
    x, w, v = one_hot[7], machine.weights, machine.factors
    pairs = sum(v[i] @ v[j] * x[i] * x[j] for i in range(13) for j in range(i + 1, 13))
    assert machine.scores(rows)[7] == pytest.approx(w @ x + pairs, abs=1e-6)
    for _ in range(10):
        machine.train_epoch()
    assert ((machine.scores(rows) > 0) == labels).mean() > 0.98


def test_each_method_finds_what_it_can(store):
    found = measure_action_baselines(store, Split.of(store), "test", CLICK, num_trials=4)
    assert list(found) == [name for name in BASELINES if name != "lightgbm" or boosted_trees.is_installed()]
    auc = {name: result.metrics["auc/click"] for name, result in found.items()}
    assert auc["log_rate"] == 0.5 and auc["item_rate"] > 0.52 and auc["user_rate"] > 0.52
    for name in ("logistic_regression", "fm", *(["lightgbm"] if "lightgbm" in auc else [])):
        assert auc[name] > max(auc["item_rate"], auc["user_rate"]) + 0.02, auc
        assert 0.8 < found[name].metrics["calibration/click"] < 1.25
        assert found[name].metrics["ne/click"] < 1
    keys = {"auc/click", "gauc/click", "log_loss/click", "ne/click", "calibration/click"}
    assert all(set(result.metrics) == keys for result in found.values())


def test_numbers_are_predicted_too(store):
    target = {"play": Wanted("seconds", "regression")}
    found = measure_action_baselines(store, Split.of(store), "test", target, num_trials=3)
    error = {name: result.metrics["mae/play"] for name, result in found.items()}
    assert all(
        error[name] < 0.9 * error["log_rate"] for name in error if name.endswith(("regression", "lightgbm", "fm"))
    )
    assert found["logistic_regression"].metrics["order_auc/play"] > 0.65


def test_kept_settings_give_the_same_predictions(store, monkeypatch):
    names = ["fm", "lightgbm"] if boosted_trees.is_installed() else ["fm"]
    first = measure_action_baselines(store, Split.of(store), "test", CLICK, names=names, num_trials=3)
    monkeypatch.setattr(action_baselines, "_fits", {})
    monkeypatch.setattr(boosted_trees, "draw_settings", lambda *_: pytest.fail("settings are searched for again"))
    again = measure_action_baselines(store, Split.of(store), "test", CLICK, names=names, num_trials=3)
    assert {name: result.metrics for name, result in first.items()} == {
        name: result.metrics for name, result in again.items()
    }


def test_columns_of_the_run_alone_are_used(store):
    split = Split.of(store)
    every, none, one = (
        measure_action_baselines(store, split, "test", CLICK, columns, names=["logistic_regression"])
        for columns in (None, {}, {"kind": "item.category"})
    )
    values = [found["logistic_regression"].metrics["auc/click"] for found in (every, none, one)]
    assert len(set(values)) == 3 and values[2] > values[1]


@pytest.mark.parametrize("rule", ["time:24000", "leave-one-out"])
def test_without_a_validation_part_the_newest_training_events_choose(store, rule):
    found = measure_action_baselines(store, Split.of(store, rule), "test", CLICK, names=["user_rate"])
    assert found["user_rate"].metrics["auc/click"] > 0.5


def test_an_unknown_name_and_a_missing_package_are_said(store, monkeypatch):
    with pytest.raises(UserError, match=r"evaluate.baselines has 'lightgb'.*Did you mean 'lightgbm'"):
        measure_action_baselines(store, Split.of(store), "test", CLICK, names=["lightgb"])
    monkeypatch.setattr(boosted_trees, "is_installed", lambda: False)
    refused = action_baselines.refused_action_baselines()
    assert list(refused) == ["lightgbm"] and "pip install" in refused["lightgbm"]
    found = measure_action_baselines(store, Split.of(store), "test", CLICK, names=["log_rate", "lightgbm"])
    assert list(found) == ["log_rate"]


def test_measuring_stops_when_asked(store):
    with pytest.raises(Interrupted):
        measure_action_baselines(store, Split.of(store), "test", CLICK, should_stop=lambda: True)
