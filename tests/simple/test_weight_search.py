"""The search for the weights of a sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turbogr.data.split import Split
from turbogr.evaluation.item_ranking import MatrixScores
from turbogr.simple import weight_search
from turbogr.simple.validation import Validation, criterion
from turbogr.simple.weight_search import LEAST_SHARE, search_shares
from turbogr.simple.weighted_sum import WeightedSum

NUM_ITEMS, NUM_USERS = 500, 300


class Given:
    """Scores that are given by user, whatever the history."""

    num_items, num_workers, batch_size = NUM_ITEMS, 2, 64

    def __init__(self, scores):
        self.scores = scores.astype(np.float32)

    def score(self, histories, step):
        step(len(histories.users))
        return MatrixScores(torch.from_numpy(self.scores[histories.users]))


@pytest.fixture
def store(make_store):
    generator = np.random.default_rng(0)
    return make_store([generator.integers(0, NUM_ITEMS, 8).tolist() for _ in range(NUM_USERS)], NUM_ITEMS)


@pytest.fixture(params=[False, True], ids=["include", "exclude"])
def validation(store, request):
    return Validation.of(store, Split.of(store), seen_out=request.param)


def knowing(store, share, seed):
    """A scorer that knows the validation items of a share of the users; its other scores are random."""
    generator = np.random.default_rng(seed)
    scores = 0.3 * generator.random((NUM_USERS, NUM_ITEMS))
    known = np.flatnonzero(generator.random(NUM_USERS) < share)
    scores[known, store.items[Split.of(store).valid[known]]] += 0.6
    return Given(scores)


def measured(scorers, validation):
    values = [criterion(validation.positions(scorer)) for scorer in scorers]
    return values, [validation.spread(scorer) for scorer in scorers]


def test_the_criterion_of_a_sum_of_candidates_is_that_of_all_items(store, validation, monkeypatch):
    scorers = [knowing(store, 0.5, 1), knowing(store, 0.5, 2)]
    parts = np.array([1.0, 2.5])
    _, spreads = measured(scorers, validation)
    weights = [float(part) / spread for part, spread in zip(parts, spreads, strict=True)]
    exact = criterion(validation.positions(WeightedSum(scorers, weights, [None, None])))
    candidates = weight_search._Candidates.of(scorers, spreads, validation)
    assert candidates.gains(candidates.sum(parts)).mean() == pytest.approx(exact, rel=2e-3)
    monkeypatch.setattr(weight_search, "TOP", NUM_ITEMS)
    candidates = weight_search._Candidates.of(scorers, spreads, validation)
    assert candidates.gains(candidates.sum(parts)).mean() == pytest.approx(exact, rel=1e-12)


def test_scorers_that_know_different_users_are_summed_and_one_that_knows_nothing_is_left_out(store, validation):
    scorers = [knowing(store, 0.6, 1), knowing(store, 0.4, 2), knowing(store, 0.0, 3)]
    values, spreads = measured(scorers, validation)
    shares = search_shares(scorers, values, spreads, validation)
    assert sum(shares) == pytest.approx(1)
    assert min(shares[:2]) > LEAST_SHARE and shares[2] == 0
    weights = [share / spread for share, spread in zip(shares, spreads, strict=True)]
    assert criterion(validation.positions(WeightedSum(scorers, weights, [None] * 3))) > 1.05 * max(values)


def test_what_is_found_replaces_the_prior_only_where_it_is_better_beyond_the_noise(store, validation, monkeypatch):
    """Two scorers that are equally good have equal shares, although luck favours one; one that the prior
    underestimates, since it is given a low value, is found."""
    scorers = [knowing(store, 0.3, seed) for seed in (1, 2)]
    _, spreads = measured(scorers, validation)
    assert search_shares(scorers, [1.0, 1.0], spreads, validation) == pytest.approx([0.5, 0.5])
    monkeypatch.setattr(weight_search, "SIGNIFICANT", 0.0)
    assert search_shares(scorers, [1.0, 1.0], spreads, validation) != pytest.approx([0.5, 0.5])
    monkeypatch.undo()
    better = [knowing(store, 0.1, 1), knowing(store, 0.8, 2)]
    _, spreads = measured(better, validation)
    assert search_shares(better, [1.0, 0.3], spreads, validation)[1] > 0.5


def test_equal_scorers_share_equally_before_anything_is_added(store, validation, monkeypatch):
    monkeypatch.setattr(weight_search, "ADDED_PARTS", 0)
    scorer = knowing(store, 0.4, 1)
    values, spreads = measured([scorer] * 4, validation)
    assert search_shares([scorer] * 4, values, spreads, validation) == pytest.approx([0.25] * 4)


def test_many_equal_scorers_are_not_all_left_out(store, validation, monkeypatch):
    monkeypatch.setattr(weight_search, "ADDED_PARTS", 0)
    scorer = knowing(store, 0.4, 1)
    values, spreads = measured([scorer] * 20, validation)
    assert search_shares([scorer] * 20, values, spreads, validation) == pytest.approx([0.05] * 20)


def test_all_digits_are_the_same_whatever_the_number_of_threads(store, validation, threads):
    scorers = [knowing(store, 0.3, 1), knowing(store, 0.3, 2)]
    values, spreads = measured(scorers, validation)
    found = []
    for number in (1, 2):
        threads(number)
        found.append(search_shares(scorers, values, spreads, validation))
    assert found[0] == found[1]
