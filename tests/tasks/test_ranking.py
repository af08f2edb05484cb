"""The ranking task: what queries see, training and resuming, tables over ranks, predictions of events and requests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.ranks import run_ranks
from tests.parallel.test_pipeline import MODES, train_all_modes
from tests.parallel.training import train_steps, whole_state
from tests.tasks.ranking_store import TASKS, ranking_config, write_ranking_store
from tests.training.test_pipeline import train_epochs, trainer_of, weights, with_pipeline
from turbogr import machine
from turbogr.config import Config, FeatureConfig, RankingTarget, dump_config, load_config
from turbogr.data.action_counts import ActionCounts, Values
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.jagged import Jagged
from turbogr.models.ranking_layout import earlier_events, every_event, last_events, ranking_layout
from turbogr.runs import open_run
from turbogr.tasks.ranking import RankingTask
from turbogr.tasks.ranking_prediction import predict_events
from turbogr.tasks.ranking_requests import RankingRequests
from turbogr.tasks.task import DataFacts
from turbogr.training.run import resolve_against, train


@pytest.fixture(autouse=True)
def _no_gemm_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_ranking_store(tmp_path_factory.mktemp("ranking") / "store")


@pytest.fixture(scope="module")
def finished(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ranking") / "run"
    train(with_ranking(ranking_config(), counts=True, delay=90), store.path, run)
    return run


def with_ranking(config: Config, **changes: Any) -> Config:
    ranking = dataclasses.replace(config.options["ranking"], **changes)
    return dataclasses.replace(config, options={**config.options, "ranking": ranking})


def events_of(lengths: list[int]) -> Jagged:
    return Jagged.from_lengths(torch.arange(sum(lengths)), torch.tensor(lengths))


def test_a_query_sees_earlier_events_alone() -> None:
    events, times = events_of([3, 0, 2]), torch.tensor([5, 7, 7, 1, 2])
    assert earlier_events(events, times).tolist() == [0, 1, 1, 0, 1]
    assert earlier_events(events, times, 1).tolist() == [0, 1, 1, 0, 0]
    assert earlier_events(events, times, 2).tolist() == [0, 0, 0, 0, 0]
    layout = ranking_layout(events, *every_event(events, times))
    # The user, two events of history and three queries; a user alone; the user, one event and two queries.
    assert layout.offsets.tolist() == [0, 6, 7, 11]
    assert layout.history.tolist() == [0, 1, 3] and layout.queries.tolist() == [0, 1, 2, 3, 4]
    assert layout.query_rows.tolist() == [3, 4, 5, 9, 10] and layout.query_users.tolist() == [0, 0, 0, 2, 2]
    assert layout.visible.first.tolist() == [0] * 11
    assert layout.visible.last.tolist() == [1, 2, 3, 1, 2, 2, 1, 1, 2, 1, 2]
    pool = ["u0", "u1", "u2", "h0", "h1", "h3", "q0", "q1", "q2", "q3", "q4"]
    assert [pool[k] for k in layout.order] == ["u0", "h0", "h1", "q0", "q1", "q2", "u1", "u2", "h3", "q3", "q4"]


def test_candidates_are_the_last_events_and_see_the_history_at_earlier_times() -> None:
    events, times = events_of([4, 1]), torch.tensor([1, 2, 2, 3, 9])
    is_history, is_query, sees = last_events(events, times, 2)
    assert is_history.tolist() == [True, True, False, False, False]
    assert is_query.tolist() == [False, False, True, True, True]
    assert sees[is_query].tolist() == [1, 2, 0], "an event of the same second is not seen"


@pytest.mark.parametrize("supervision", ["every", "candidates"])
def test_no_event_sees_its_own_actions_or_later_ones(supervision: str, store: Store, tmp_path: Path) -> None:
    config = with_ranking(ranking_config(), supervision=supervision, candidates=3)
    trainer = trainer_of(config, store, tmp_path / "run")
    task, tables = trainer.task, trainer.tables
    assert isinstance(task, RankingTask)
    batch = trainer.loader.batch(0, 0)
    layout = task.layout(batch)
    user = int(batch.items.lengths.argmax())
    changed = int(batch.items.offsets[user + 1]) - 4

    def outputs(actions: dict[str, torch.Tensor]) -> torch.Tensor:
        sets = tables.fetch(task.ids(batch))
        vectors = sets.look_up_inputs(task.ids(batch), torch.device("cpu"))
        return task.outputs(vectors, dataclasses.replace(batch, actions=actions), layout, None)

    other = {name: values.clone() for name, values in batch.actions.items()}
    other["action.click"][changed] = 1 - other["action.click"][changed]
    moved = (outputs(dict(batch.actions)) != outputs(other)).any(1)
    times, queries = batch.times, layout.queries
    own = (queries >= batch.items.offsets[user]) & (queries < batch.items.offsets[user + 1])
    sees = own & (times[queries] > times[changed])
    assert sees.any() and torch.equal(moved, sees)


def test_one_pass_over_all_events_predicts_what_a_request_for_each_does(store: Store, finished: Path) -> None:
    opened = open_run(finished)
    task = opened.task
    assert isinstance(task, RankingTask)
    starts, ends = np.asarray(store.offsets[:-1]), np.asarray(store.offsets[1:])
    dense = predict_events(task, opened.tables, store, starts, ends)
    users = np.repeat(np.arange(store.num_users), ends - starts)
    events = np.arange(store.num_events)
    one = torch.ones(store.num_events, dtype=torch.int64)
    items = Jagged.from_lengths(torch.from_numpy(np.asarray(store.items, np.int64)), one)
    requests = RankingRequests(users, events, np.asarray(store.times), items, events=events)
    for name, found in task.predict(opened.tables, store, requests).items():
        np.testing.assert_allclose(found, dense[name], rtol=1e-5, atol=2e-6)
    assert dense["click"].min() > 0 and dense["click"].max() < 1 and np.ptp(dense["click"]) > 0.3


def test_candidates_do_not_change_each_other_and_long_lists_are_cut(store: Store, finished: Path) -> None:
    opened = open_run(finished)
    task = opened.task
    assert isinstance(task, RankingTask)
    many = torch.arange(40).repeat(3)[:100]
    ends = np.asarray(store.offsets[1:])
    late = np.array([2_000_000_000])
    together = RankingRequests(np.array([5]), ends[5:6], late, Jagged.from_lengths(many, torch.tensor([100])))
    found = task.predict(opened.tables, store, together)["click"]
    alone = RankingRequests(np.array([5]), ends[5:6], late, Jagged.from_lengths(many[77:78], torch.tensor([1])))
    np.testing.assert_allclose(found[77], task.predict(opened.tables, store, alone)["click"][0], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(found[:20], found[40:60], rtol=1e-5, atol=2e-6)
    unknown = RankingRequests(np.array([-1]), np.array([0]), late, Jagged.from_lengths(many[:3], torch.tensor([3])))
    assert np.isfinite(task.predict(opened.tables, store, unknown)["stay"]).all()
    tabs = {"event.tab": np.array([0, 2, -1])}
    given = dataclasses.replace(unknown, event_features=tabs)
    shown = task.predict(opened.tables, store, given)["click"]
    plain = task.predict(opened.tables, store, unknown)["click"]
    assert shown[0] != plain[0] and shown[1] != plain[1] and shown[2] == plain[2]


def test_predictions_do_not_depend_on_how_events_are_batched(
    store: Store, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_run(finished)
    split = Split.of(store)
    assert isinstance(opened.task, RankingTask)
    whole = predict_events(opened.task, opened.tables, store, *split.events("test"))
    monkeypatch.setattr("turbogr.tasks.ranking_prediction._EVENTS_AT_ONCE", 7)
    cut = predict_events(opened.task, opened.tables, store, *split.events("test"))
    for name in TASKS:
        np.testing.assert_allclose(cut[name], whole[name], rtol=1e-5, atol=2e-6)


def test_the_summary_has_every_metric_of_every_task(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    wanted = {f"{name}/click" for name in ("auc", "gauc", "log_loss", "ne", "calibration")}
    assert wanted | {"mae/stay", "order_auc/stay"} <= summary["metrics"].keys()
    assert summary["task"] == "ranking" and summary["part"] == "test"
    assert "all" in summary["protocol"]["text"] and "predicted" in summary["protocol"]["text"]


def test_it_learns_what_users_click_from_what_they_clicked_before(tmp_path: Path) -> None:
    store = write_ranking_store(tmp_path / "store", num_users=500)
    config = with_ranking(ranking_config(), counts=True)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=2e-3))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=6))
    train(config, store.path, tmp_path / "run")
    metrics = json.loads((tmp_path / "run/summary.json").read_text())["metrics"]
    assert metrics["auc/click"] > 0.68, "the rate of an item is no better than .5, that of a user about .55"
    assert 0.85 < metrics["calibration/click"] < 1.15


def test_features_of_the_store_become_tables(store: Store, tmp_path: Path) -> None:
    resolved = resolve_against(ranking_config(), store)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(resolved))
    assert load_config(path) == resolved and resolve_against(load_config(path), store) == resolved
    specs = {spec.name: (spec.num_rows, spec.dim) for spec in RankingTask.table_specs(resolved, store.num_items)}
    assert specs == {
        "item": (40, 16), "tab": (4, 16), "device": (3, 16), "author": (5, 16), "tag": (6, 6), "city": (4, 16),
        "age": (5, 16), "user": (61, 16),
    }  # fmt: skip
    named = dataclasses.replace(ranking_config(), features={"tab": FeatureConfig()}, tables={})
    assert list(resolve_against(named, store).features) == ["tab"]
    without = dataclasses.replace(ranking_config().data, without_features=("tag", "user.city"))
    config = dataclasses.replace(ranking_config(), data=without, tables={})
    assert not {"tag", "city"} & resolve_against(config, store).features.keys()


def test_counts_are_those_of_earlier_events_and_of_items_in_training_alone(store: Store) -> None:
    clicks = np.asarray(store.features["action.click"].values, np.float64)
    users, items = np.repeat(np.arange(store.num_users), store.lengths), np.asarray(store.items, np.int64)
    times, until = np.asarray(store.times), int(np.quantile(store.times, 0.8))
    tab, tag = store.features["event.tab"], store.features["item.tag"]
    counts = ActionCounts(store, ["click"], {"tab": tab, "tag": tag}, {"click": (0.4, 0.0)}, until)
    tabs, (tags, lengths) = tab.table_rows(np.arange(len(items))), tag.table_row_lists(items)
    found = counts.floats(users, items, times, {"tab": Values(tabs), "tag": Values(tags, lengths)})
    assert found.shape == (store.num_events, ActionCounts.width(1, 2))
    has_tag = np.zeros((len(items), 7))
    np.add.at(has_tag, (np.repeat(np.arange(len(items)), lengths), tags), 1)
    end = times.max() + 1
    for event in range(0, store.num_events, 7):
        mine = users == users[event]
        before = times < times[event]
        rate = (clicks[mine & before].sum() + 4) / ((mine & before).sum() + 10)
        own_tags = np.repeat(np.arange(7), has_tag[event].astype(int))
        groups = [
            ([items == items[event]], until, 0.4),
            ([mine], end, 0.4),
            ([mine & (items == items[event])], end, rate),
            ([tabs == tabs[event]], until, 0.4),
            ([mine & (tabs == tabs[event])], end, rate),
            ([has_tag[:, own] for own in own_tags], until, 0.4),
            ([mine * has_tag[:, own] for own in own_tags], end, rate),
        ]
        for column, (members, until_here, prior) in enumerate(groups):
            kept = [member * (times < min(times[event], until_here)) for member in members]
            size = sum(float(each.sum()) for each in kept) / max(1, len(kept))
            positive = sum(float((clicks * each).sum()) for each in kept) / max(1, len(kept))
            of_group = (positive + 10 * prior) / (size + 10)
            wanted = [np.log1p(size) / 3, np.log(of_group / (1 - of_group)) - np.log(prior / (1 - prior))]
            np.testing.assert_allclose(found[event, 2 * column : 2 * column + 2], wanted, atol=1e-5)
        gap = times[event] - times[mine & before].max() if (mine & before).any() else 0
        known = [np.log1p(gap) / 8, float((mine & before).any())]
        np.testing.assert_allclose(found[event, 14:], known, atol=1e-5)
    nothing = {"tab": Values(np.zeros(1, np.int64)), "tag": Values(np.zeros(0, np.int64), np.zeros(1, np.int64))}
    unknown = counts.floats(np.array([-1]), np.array([-1]), times[:1], nothing)
    assert not unknown[0, :6].any() and not unknown[0, 14:].any(), "an unknown user and item have had nothing"


def test_every_table_and_parameter_is_learnt(store: Store, tmp_path: Path) -> None:
    trainer = trainer_of(ranking_config(), store, tmp_path / "run")
    before = {name: table.clone() for name, table in trainer.tables.gather_all().items()}
    dense = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    train_epochs(trainer, 1)
    for name, table in trainer.tables.gather_all().items():
        assert not torch.equal(before[name], table), name
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(dense[name], parameter), name
    seen = np.zeros(store.num_items, bool)
    split = Split.of(store)
    for user in range(store.num_users):
        seen[store.items[store.offsets[user] : split.train_end[user]]] = True
    unseen = trainer.tables.gather("item")[torch.from_numpy(~seen)]
    assert not unseen.any(), "an item without training events stays an unknown one"


@pytest.mark.parametrize("options", [{"depth": 4}, {"mode": "exact_overlap"}], ids=["sync", "exact_overlap"])
def test_sync_and_exact_overlap_are_the_serial_loop_bit_for_bit(
    options: dict[str, Any], store: Store, tmp_path: Path
) -> None:
    serial = trainer_of(ranking_config(), store, tmp_path / "serial")
    train_epochs(serial)
    trainer = trainer_of(with_pipeline(ranking_config(), **options), store, tmp_path / "run")
    train_epochs(trainer)
    for ours, theirs in zip(weights(trainer), weights(serial), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["semi_async", "exact_overlap"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    mode: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.training.test_run import assert_same_end, stop_after

    config = with_pipeline(ranking_config(), mode=mode)
    train(config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(config, store.path, tmp_path / "stopped").status == "interrupted"
    assert train(config, store.path, tmp_path / "stopped", resume=True).status == "finished"
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")


def test_a_mesh_of_four_trains_eight_tables_to_the_weights_of_one_in_every_mode(store: Store, tmp_path: Path) -> None:
    config = ranking_config()
    assert len(RankingTask.table_specs(resolve_against(config, store), store.num_items)) == 8
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, check_every=2))
    ranks = run_ranks(4, train_all_modes, config, store.path, tmp_path / "many", 2)[0]
    for mode, options in MODES.items():
        one = trainer_of(with_pipeline(config, **options), store, tmp_path / f"one-{mode}")
        train_epochs(one, 1)
        for name, tensor in whole_state(one).items():
            found = ranks[mode]["state"][name]
            np.testing.assert_allclose(found, tensor.numpy(), rtol=2e-3, atol=2e-4, err_msg=f"{mode}: {name}")
    assert ranks["semi_async"]["staleness"] == 2 and ranks["sync"]["staleness"] == 0


def test_candidates_train_on_a_mesh_as_in_one_process(store: Store, tmp_path: Path) -> None:
    config = with_ranking(ranking_config(), supervision="candidates", candidates=4)
    one = train_steps(config, store.path, tmp_path / "one", 1, 4)["state"]
    ranks = run_ranks(2, train_steps, config, store.path, tmp_path / "many", 1, 4)
    for name, tensor in one.items():
        np.testing.assert_allclose(ranks[0]["state"][name], tensor, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": {}}, r"needs something to predict; name it, such as ranking\.tasks\.click\.action=is_click"),
        ({"tasks": {"clik": RankingTarget()}}, r"ranking\.tasks\.clik names the action 'clik', .*Did you mean 'click'"),
        ({"tasks": {"stay": RankingTarget("watch")}}, r"predicts whether 'watch' happens, and it is a number"),
        ({"inputs": ("follow",)}, r"ranking\.inputs names the action 'follow', .*it has click, watch"),
        ({"tasks": {"click": RankingTarget(weight=0.0)}}, r"all tasks .* have the weight 0"),
    ],
)
def test_a_bad_section_is_refused(change: dict[str, Any], message: str, store: Store) -> None:
    with pytest.raises(UserError, match=message):
        resolve_against(with_ranking(ranking_config(), **change), store)


def test_what_cannot_be_a_feature_is_refused(store: Store) -> None:
    config = dataclasses.replace(ranking_config(), features={"click": FeatureConfig("action.click")}, tables={})
    with pytest.raises(UserError, match="is the action 'click', which is not known when an item is shown"):
        resolve_against(config, store)
    blocks = dataclasses.replace(ranking_config().model, name="hstu")
    config = resolve_against(dataclasses.replace(ranking_config(), model=blocks), store)
    with pytest.raises(UserError, match=r"set model\.name=stu"):
        RankingTask(config, DataFacts(store.num_items))
