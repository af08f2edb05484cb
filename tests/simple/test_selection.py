"""Settings are chosen on the validation items; digits depend neither on batches nor on threads."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.simple import plain
from tests.stores import draw_histories
from turbogr.data.split import Split
from turbogr.evaluation.evaluator import evaluate
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.job_pool import Interrupted
from turbogr.simple import ease, session_knn
from turbogr.simple.delivery import choose_delivered
from turbogr.simple.methods import METHODS
from turbogr.simple.popular_items import PopularItems
from turbogr.simple.selection import choose_methods, hold_out_last
from turbogr.simple.training_events import TrainingEvents
from turbogr.simple.validation import Validation, best_of, criterion
from turbogr.simple.weighted_sum import WeightedSum


def value_of(scorer, store, split, *, seen_out):
    """The criterion by its definition, from the evaluator's metrics."""
    metrics = evaluate(scorer, store, split, "valid", ks=(10, 100), filter_seen=seen_out).metrics
    return (metrics["ndcg@10"] + metrics["ndcg@100"]) / 2


@pytest.mark.parametrize("seen_out", [True, False])
def test_the_chosen_settings_are_the_best_of_those_beside_them(store, split, events, seen_out):
    selection = choose_methods(store, split, seen_out=seen_out)
    expected = [name for name in METHODS if name != "recent-items" or not seen_out]
    assert list(selection.methods) == expected and selection.refused == {}
    assert selection.chosen_on == "the validation items"
    for name, chosen in selection.methods.items():
        assert chosen.value == pytest.approx(value_of(chosen.scorer, store, split, seen_out=seen_out), abs=1e-12)
        choices = METHODS[name].choices(store.num_items)
        assert chosen.settings.keys() == choices.keys()
        last = list(choices or {"": ()})[-1]  # it is chosen with all others as they are in the end
        for value in choices.get(last, ()):
            other = METHODS[name].fit(events, {**chosen.settings, last: value})
            assert value_of(other, store, split, seen_out=seen_out) <= chosen.value + 1e-12


class Recording:
    """A method that is a Markov chain if its setting `a` is 2, else popularity, and notes what it is tried with."""

    name, needs_repeats = "popularity", False

    def __init__(self):
        self.tried = []

    def refusal(self, facts):
        return None

    def choices(self, num_items):
        return {"a": (1.0, 2.0), "b": (10.0, 20.0)}

    def fit(self, events, settings, should_stop=None):
        self.tried.append(tuple(settings.values()))
        if settings["a"] == 1.0:
            return PopularItems().fit(events, {})
        return METHODS["skip-markov"].fit(events, {"decay": 0.7, "virtual": 3.0, "backward": 0.0})


def test_one_setting_after_the_other_is_chosen_and_of_equal_values_the_first(store, split, monkeypatch):
    method = Recording()
    monkeypatch.setitem(METHODS, "popularity", method)
    found = choose_methods(store, split, seen_out=False, names=["popularity"]).methods["popularity"]
    assert method.tried == [(1.0, 10.0), (2.0, 10.0), (2.0, 20.0)]
    assert found.settings == {"a": 2.0, "b": 10.0}


def test_without_validation_items_the_last_training_items_choose(make_store):
    store = make_store(draw_histories(3, 150, 22), 23, split="leave-one-out")
    split = Split.of(store)
    inner = hold_out_last(store, split)
    selection = choose_methods(store, split, seen_out=False, names=["skip-markov", "recent-items"])
    assert selection.chosen_on == "the last training items"
    by_hand = choose_methods(store, inner, seen_out=False, names=["skip-markov", "recent-items"])
    for name, chosen in selection.methods.items():
        assert (chosen.settings, chosen.value) == (by_hand.methods[name].settings, by_hand.methods[name].value)
        again = METHODS[name].fit(TrainingEvents.of(store, split), chosen.settings)
        histories = [[1, 2], [3]]
        assert np.array_equal(plain.scores_of(chosen.scorer, histories), plain.scores_of(again, histories))
        assert not np.array_equal(
            plain.scores_of(by_hand.methods[name].scorer, histories), plain.scores_of(again, histories)
        )


def test_the_last_training_item_of_users_who_have_two_is_held_out(make_store):
    store = make_store([[1], [1, 2], [1, 2, 3], [4, 3, 2, 1]], 5, split="leave-one-out")
    split = Split.of(store)
    inner = hold_out_last(store, split)
    held = [None if event < 0 else int(store.items[event]) for event in inner.valid]
    assert held == [None, None, 2, 2]
    assert plain.training_histories(store, inner) == [[1], [1], [1], [4, 3]]
    assert inner.test.tolist() == split.test.tolist()


def test_where_nobody_has_two_training_items_the_usual_settings_are_taken(make_store):
    store = make_store([[1, 2], [2, 3], [1, 3]], 5)
    selection = choose_methods(store, Split.of(store), seen_out=True)
    assert selection.chosen_on == "nothing: no user has two training items"
    assert list(selection.methods) == [name for name in METHODS if name != "recent-items"]
    for name, chosen in selection.methods.items():
        assert chosen.settings == {key: values[0] for key, values in METHODS[name].choices(5).items()}
        assert math.isnan(chosen.value)
        assert evaluate(chosen.scorer, store, Split.of(store)).num_users == 3


def test_names_restrict_and_refusals_are_named(store, split, monkeypatch):
    monkeypatch.setattr(ease, "MAX_ITEMS", 20)
    monkeypatch.setattr(session_knn, "MAX_EVENTS", 100)
    selection = choose_methods(store, split, seen_out=True, names=["markov", "session-knn", "ease", "popularity"])
    assert list(selection.methods) == ["popularity"]
    assert list(selection.refused) == ["session-knn", "ease"]
    assert "23 items" in selection.refused["ease"] and "at most 20" in selection.refused["ease"]
    assert f"{store.num_events:,}" in selection.refused["session-knn"]


def settings_of(name):
    return {key: values[-1] for key, values in METHODS[name].choices(23).items()}


@pytest.mark.parametrize("name", METHODS)
def test_positions_do_not_depend_on_batches_and_threads(store, split, threads, name):
    found = []
    for number, batch_size in itertools.product((1, 2), (1, 64, 100, None)):
        threads(number)
        scorer = METHODS[name].fit(TrainingEvents.of(store, split), settings_of(name))
        result = evaluate(scorer, store, split, "test", batch_size=batch_size)
        found.append((result.positions.tolist(), result.metrics))
    assert found == found[:1] * len(found)


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_the_same_to_the_last_digit_in_any_company(events, name):
    scorer = METHODS[name].fit(events, settings_of(name))
    histories = draw_histories(8, 130, 23)
    together = plain.scores_of(scorer, histories)
    alone = np.concatenate([plain.scores_of(scorer, [history]) for history in histories])
    assert np.array_equal(together, alone)


def test_what_is_chosen_does_not_depend_on_threads(store, split, threads):
    found = []
    for number in (1, 2):
        threads(number)
        selection = choose_methods(store, split, seen_out=False)
        validation = Validation.of(store, split, seen_out=False)
        scorers = [chosen.scorer for chosen in selection.methods.values()]
        statistics = [(validation.spread(scorer), validation.size(scorer)) for scorer in scorers]
        delivered = choose_delivered(None, "hstu", selection, store, split, seen_out=False)
        found.append(([(c.settings, c.value) for c in selection.methods.values()], statistics, delivered))
    assert found[0] == found[1]


@pytest.mark.parametrize("names", [["ease", "skip-markov"], ["popularity", "session-knn", "item-knn"]])
@pytest.mark.parametrize("scale", [None, 0.02])
def test_a_weighted_sum_has_the_summed_scores(store, split, events, names, scale):
    scorers = [METHODS[name].fit(events, settings_of(name)) for name in names]
    weights = [0.3, 2.0, 0.7][: len(names)]
    total = WeightedSum(scorers, weights, [None, scale, scale][: len(names)])
    histories = draw_histories(8, 130, 23)
    parts = [plain.scores_of(scorer, histories).astype(np.float64) for scorer in scorers]
    if scale is not None:
        parts[1:] = [np.log(part / scale + np.sqrt((part / scale) ** 2 + 1)) for part in parts[1:]]
    expected = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(plain.scores_of(total, histories), expected, rtol=1e-5, atol=1e-6)
    done = []
    total.score(plain.given(histories), done.append)
    assert sum(done) == len(histories)
    assert (total.num_items, total.batch_size) == (23, scorers[0].batch_size)


def test_statistics_of_scores(store, split, events):
    scorer = METHODS["ease"].fit(events, settings_of("ease"))
    validation = Validation.of(store, split, seen_out=True)
    users = validation.held_out.users[:64]
    starts, ends = store.offsets[users], validation.held_out.events[:64]
    scores = plain.scores_of(scorer, [store.items[a:b].tolist() for a, b in zip(starts, ends, strict=True)])
    assert validation.size(scorer) == pytest.approx(np.abs(scores).mean(), rel=1e-5)
    assert validation.spread(scorer) == pytest.approx(scores.std(axis=1, ddof=1).mean(), rel=1e-5)


def test_the_criterion_is_the_mean_of_two_ndcgs():
    positions = np.array([1, 10, 11, 100, 101, np.iinfo(np.int64).max])
    gain = 1 / np.log2(1.0 + np.array([1, 10, 11, 100]))
    assert criterion(positions) == pytest.approx((gain[:2].sum() + gain.sum()) / 2 / 6)
    assert best_of({"a": 0.1, "b": 0.3, "c": 0.3}) == "b"


def test_large_logs_are_measured_on_some_users_drawn_the_same_way_every_time(store, split):
    held_out = HeldOut.of(store, split, "valid")
    some = held_out.sample(20)
    assert len(some) == 20 and some.users.tolist() == held_out.sample(20).users.tolist()
    assert set(some.users) < set(held_out.users) and (np.diff(some.users) > 0).all()
    assert held_out.sample(10**6) is held_out


@pytest.mark.parametrize("name", METHODS)
def test_choosing_can_be_stopped(store, split, name):
    with pytest.raises(Interrupted):
        choose_methods(store, split, seen_out=False, names=[name], should_stop=lambda: True)


@pytest.mark.parametrize("name", ["item-knn", "skip-markov", "ease"])
def test_fitting_can_be_stopped(events, name):
    with pytest.raises(Interrupted):
        METHODS[name].fit(events, settings_of(name), lambda: True)
