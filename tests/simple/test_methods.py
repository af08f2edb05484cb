"""Every simple method against its definition, written as plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simple import plain
from turbogr.evaluation.baseline_titles import ACTION_TITLES, PHRASES, TITLES
from turbogr.evaluation.baselines import popularity_positions
from turbogr.evaluation.evaluator import evaluate
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.user_histories import HistoryEvents
from turbogr.simple import ease, item_knn, item_to_item, session_knn, skip_markov
from turbogr.simple.methods import METHODS
from turbogr.simple.simple_method import LogFacts
from turbogr.simple.training_events import TrainingEvents

HISTORIES = [[4], [1, 2, 3], [5, 6, 5, 7, 5], [22], [0, 1, 0, 2, 0, 3, 9, 9], list(range(20))]


@pytest.fixture
def logs(store, split):
    return plain.training_histories(store, split)


def check(scorer, expected, tolerance=2e-5):
    found = plain.scores_of(scorer, HISTORIES)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.array([expected(history) for history in HISTORIES]), atol=tolerance, rtol=1e-4)


def test_training_events_are_those_of_the_split(events, logs, store):
    assert events.items.tolist() == [item for log in logs for item in log]
    assert events.users.tolist() == [user for user, log in enumerate(logs) for _ in log]
    assert (events.num_users, events.num_items) == (store.num_users, store.num_items)
    assert events.counts.tolist() == [sum(log.count(item) for log in logs) for item in range(store.num_items)]
    for user, log in enumerate(logs):
        assert set(np.flatnonzero(events.matrix[[user]].toarray()[0])) == set(log)
        assert set(np.flatnonzero(events.newest_items(2)[[user]].toarray()[0])) == set(log[-2:])


@pytest.mark.parametrize("decay", [1.0, 0.7])
@pytest.mark.parametrize("l2", [3.0, 100.0])
def test_ease(events, logs, store, l2, decay):
    matrix = plain.ease_matrix(logs, store.num_items, l2)
    popular = plain.popularity(logs, store.num_items)
    name = "ease" if decay == 1.0 else "ease-recency"
    settings = {"l2": l2, "popularity_weight": 0.1} | ({} if decay == 1.0 else {"decay": decay})
    scorer = METHODS[name].fit(events, settings)
    check(scorer, lambda history: plain.item_to_item(matrix, history, decay) + 0.1 * popular)


@pytest.mark.parametrize(("shrinkage", "neighbours"), [(10.0, 500), (1.0, 4)])
def test_item_knn(events, logs, store, shrinkage, neighbours, monkeypatch):
    monkeypatch.setattr(item_knn, "NEIGHBOURS", neighbours)
    monkeypatch.setattr(item_knn, "_CHUNK_ITEMS", 5)
    matrix = plain.item_knn_matrix(logs, store.num_items, shrinkage, neighbours)
    popular = plain.popularity(logs, store.num_items)
    scorer = METHODS["item-knn"].fit(events, {"decay": 0.5, "popularity_weight": 0.02, "shrinkage": shrinkage})
    check(scorer, lambda history: plain.item_to_item(matrix, history, 0.5) + 0.02 * popular)


def test_item_knn_of_long_histories_counts_their_newest_items(events, logs, store, monkeypatch):
    monkeypatch.setattr(item_knn, "MAX_PAIRS", 100)
    monkeypatch.setattr(item_knn, "LEAST_ITEMS", 3)
    matrix = plain.item_knn_matrix([log[-3:] for log in logs], store.num_items, 10.0, 500)
    scorer = METHODS["item-knn"].fit(events, {"decay": 0.5, "popularity_weight": 0.0, "shrinkage": 10.0})
    check(scorer, lambda history: plain.item_to_item(matrix, history, 0.5))


@pytest.mark.parametrize("backward", [0.0, 0.5])
@pytest.mark.parametrize("virtual", [30.0, 3.0])
def test_skip_markov(events, logs, store, backward, virtual, monkeypatch):
    monkeypatch.setattr(skip_markov, "NEWEST", 6)
    matrix = plain.skip_markov_matrix(logs, store.num_items, window=10, fade=0.8, virtual=virtual, backward=backward)
    scorer = METHODS["skip-markov"].fit(events, {"decay": 0.7, "virtual": virtual, "backward": backward})
    check(scorer, lambda history: plain.item_to_item(matrix, history, 0.7, newest=6))


@pytest.mark.parametrize("neighbours", [100, 7, 1])
def test_session_knn(events, logs, store, neighbours, monkeypatch):
    monkeypatch.setattr(session_knn, "NEWEST", 6)
    popular = plain.popularity(logs, store.num_items)
    scorer = METHODS["session-knn"].fit(events, {"decay": 0.7, "neighbours": neighbours, "popularity_weight": 0.1})

    def expected(history):
        options = {"neighbours": neighbours, "decay": 0.7, "newest": 6}
        return plain.session_knn(logs, store.num_items, history, **options) + 0.1 * popular

    check(scorer, expected)


def test_recent_items(events, logs, store):
    popular = plain.popularity(logs, store.num_items)
    scorer = METHODS["recent-items"].fit(events, {"decay": 0.8})

    def expected(history):
        own = [sum(0.8**age for age, event in enumerate(reversed(history)) if event == i) for i in range(len(popular))]
        return np.array(own) + 1e-6 * popular

    check(scorer, expected)


@pytest.mark.parametrize("filter_seen", [True, False])
def test_popularity_is_that_of_the_streamed_baseline(store, split, events, filter_seen):
    result = evaluate(METHODS["popularity"].fit(events, {}), store, split, "test", filter_seen=filter_seen)
    counts = store.item_counts(split.train_end)
    exclude_seen, include_seen = popularity_positions(HeldOut.of(store, split, "test"), counts)
    assert result.positions.tolist() == (exclude_seen if filter_seen else include_seen).tolist()


def test_items_that_are_had_several_times_count_as_the_newest_or_every_time():
    events = HistoryEvents(np.array([1, 2, 1, 0, 0]), np.zeros(5, np.int64), np.array([3, 0, 2]))
    once = item_to_item.history_weights(events, 4, 0.5).toarray()
    assert once.tolist() == [[0, 1, 0.5, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    every_time = item_to_item.history_weights(events, 4, 0.5, sum_repeats=True).toarray()
    assert every_time.tolist() == [[0, 1.25, 0.5, 0], [0, 0, 0, 0], [1.5, 0, 0, 0]]


@pytest.mark.parametrize("most", [1, 2, 3, 10])
@pytest.mark.parametrize("seed", range(5))
def test_the_largest_values_of_a_row_stay_and_of_ties_the_smaller_columns(seed, most):
    generator = np.random.default_rng(seed)
    dense = generator.integers(0, 4, (9, 8)).astype(np.float32)
    matrix = _shuffled(dense, generator)
    kept = item_to_item.keep_largest(matrix, most).toarray()
    for row, found in zip(dense, kept, strict=True):
        order = sorted(np.flatnonzero(row), key=lambda column, row=row: (-row[column], column))[:most]
        expected = np.zeros_like(row)
        expected[order] = row[order]
        assert found.tolist() == expected.tolist()


def _shuffled(dense, generator):
    """A sparse matrix whose columns stand in any order within a row, as products of sparse matrices have them."""
    from scipy import sparse

    columns = [generator.permutation(np.flatnonzero(row)) for row in dense]
    data = [row[chosen] for row, chosen in zip(dense, columns, strict=True)]
    ends = np.cumsum([0, *map(len, columns)])
    return sparse.csr_array((np.concatenate(data), np.concatenate(columns), ends), shape=dense.shape)


def test_every_method_has_its_names_and_a_reason_where_a_log_is_too_large():
    assert set(METHODS) | {"markov"} == set(TITLES) == set(PHRASES) - set(ACTION_TITLES)
    small, large = LogFacts(10, 10, 100), LogFacts(10**7, 10**6, 10**9)
    assert [name for name, method in METHODS.items() if method.refusal(small)] == []
    refused = {name: reason for name, method in METHODS.items() if (reason := method.refusal(large))}
    assert set(refused) == {"item-knn", "session-knn", "skip-markov", "ease", "ease-recency"}
    assert all("1,000,000" in reason for reason in refused.values())


def test_the_limits_are_those_that_the_reasons_name():
    for module, facts in ((ease, LogFacts(1, ease.MAX_ITEMS, 1)), (item_knn, LogFacts(1, 1, item_knn.MAX_EVENTS))):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        assert METHODS[name].refusal(facts) is None
        assert METHODS[name].refusal(LogFacts(1, facts.num_items + 1, facts.num_events + 1)) is not None


def test_a_fitted_part_is_remembered_for_settings_that_share_it(events, monkeypatch):
    fitted = []
    monkeypatch.setattr(ease, "_fit", lambda events, l2, stop: fitted.append(l2) or np.eye(23, dtype=np.float32))
    for settings in ({"l2": 1.0, "popularity_weight": 0.0}, {"l2": 1.0, "popularity_weight": 0.5}):
        METHODS["ease"].fit(events, settings)
    assert fitted == [1.0]
    METHODS["ease"].fit(events, {"l2": 2.0, "popularity_weight": 0.0})
    assert fitted == [1.0, 2.0]


def test_a_log_without_training_events_can_be_fitted():
    nothing = TrainingEvents(np.empty(0, np.int64), np.empty(0, np.int64), 3, 5)
    for method in METHODS.values():
        settings = {name: values[0] for name, values in method.choices(5).items()}
        assert np.isfinite(plain.scores_of(method.fit(nothing, settings), [[1, 2]])).all()
