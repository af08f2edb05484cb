"""Which trial goes on, and which settings are tried."""

from __future__ import annotations

import math

import pytest

from turbogr.config import Config, ModelConfig
from turbogr.tuning.halving import Trial, best_trial, next_promotion, rung_epochs
from turbogr.tuning.search_space import MOST_TRIALS, settings_to_try


def trials(*values: list[float]) -> list[Trial]:
    return [Trial(f"{n}", (), list(v), v[-1] if v else None) for n, v in enumerate(values)]


@pytest.mark.parametrize(
    ("epochs", "every", "expected"),
    [(90, 10, [10, 30, 90]), (10, 1, [1, 3, 10]), (5, 5, [5]), (7, 2, [2, 7]), (None, 1, [None])],
)
def test_rungs_are_evaluations_and_end_at_the_end(epochs, every, expected):
    assert rung_epochs(epochs, every) == expected


def test_one_of_three_goes_on_the_best_one():
    waiting = trials([0.1], [0.3], [0.2])
    assert next_promotion(waiting[:2], (), 3, higher_is_better=True) is None
    assert next_promotion(waiting, (), 3, higher_is_better=True) is waiting[1]
    assert next_promotion(waiting, (), 3, higher_is_better=False) is waiting[0]
    assert next_promotion(waiting, {"1"}, 3, higher_is_better=True) is None


def test_the_highest_rung_goes_first_and_the_last_rung_is_the_end():
    found = trials([0.1, 0.5], [0.1, 0.6], [0.1, 0.4], [0.9], [0.8], [0.7])
    assert next_promotion(found, (), 3, higher_is_better=True) is found[1]
    assert next_promotion(found, {"1"}, 3, higher_is_better=True) is found[3]
    ended = trials([0.1, 0.5, 0.6], [0.2], [0.1])
    assert next_promotion(ended, (), 3, higher_is_better=True) is ended[1]
    assert next_promotion(trials([0.1, 0.5, 0.6]), (), 3, higher_is_better=True, last=True) is None


def test_the_best_goes_on_when_nothing_new_is_left_and_failed_ones_never():
    found = trials([0.1], [0.2])
    assert next_promotion(found, (), 3, higher_is_better=True, last=True) is found[1]
    found[1].failed = "it diverged"
    assert next_promotion(found, (), 3, higher_is_better=True, last=True) is found[0]
    assert best_trial(found, higher_is_better=True) is found[0]
    assert best_trial(trials([]), higher_is_better=True) is None and math.isnan(trials([])[0].value)


def test_the_recipe_comes_first_and_no_settings_twice():
    tried = list(settings_to_try(Config(), 100, 1000))
    assert tried[0] == () and len(tried) == len(set(tried)) == MOST_TRIALS
    assert tried == list(settings_to_try(Config(), 100, 1000))
    assert any(("loss.name", "full-softmax") in settings for settings in tried)
    assert not any(("loss.name", "full-softmax") in s for s in settings_to_try(Config(), 10**6, 10**6))


def test_settings_that_are_given_or_are_the_recipes_own_are_not_tried():
    config = Config(model=ModelConfig(dim=64, num_blocks=2))
    tried = {setting for settings in settings_to_try(config, 100, 1000, {"optimizer.lr"}) for setting in settings}
    assert "optimizer.lr" not in {key for key, _ in tried}
    assert ("model.dim", "64") not in tried and ("model.dim", "128") in tried
    assert ("model.name", "hstu") not in tried and ("model.dropout", "0.2") not in tried
