"""`defaults: from-data`: what a recipe leaves open follows from the size of the data."""

from __future__ import annotations

from typing import Any

import pytest

from turbogr.config import Config, dump_config, load_config
from turbogr.config.from_data import FEWEST_EPOCHS, FULL_SOFTMAX_WORK, MOST_EPOCHS, SMALL, TRAINING_SECONDS
from turbogr.config.resolve import resolve
from turbogr.negatives import LossContext, make_loss


def resolved(*overrides: str, num_events: int = 20_000, num_items: int = 3000, **facts: Any) -> Config:
    sizes: dict[str, Any] = {"num_sequences": 6000, "typical_length": 40, "longest_length": 90, **facts}
    return resolve(load_config("quickstart", overrides), num_items=num_items, num_events=num_events, **sizes)


def test_a_small_log_gets_more_dropout_and_a_softer_loss_than_a_large_one() -> None:
    small, large = resolved(num_events=SMALL - 1), resolved(num_events=SMALL)
    assert small.model.dropout > large.model.dropout
    assert small.loss.temperature > large.loss.temperature


def test_all_items_are_compared_where_that_is_affordable() -> None:
    num_items = 3000
    most = int(FULL_SOFTMAX_WORK / num_items)
    assert resolved(num_events=most, num_items=num_items).loss.name == "full-softmax"
    assert resolved(num_events=most + 1, num_items=num_items).loss.name == "sampled-softmax"


@pytest.mark.parametrize(("override", "num_events"), [("train.seed=0", 1000), ("loss.name=full-softmax", 10**9)])
def test_a_loss_over_all_items_can_be_made_of_what_is_chosen(override: str, num_events: int) -> None:
    config = resolved(override, num_events=num_events)
    assert config.loss.name == "full-softmax"
    make_loss(config, LossContext(3000, 0, None))


@pytest.mark.parametrize("override", ["loss.sampler=uniform", "loss.num_negatives=64", "loss.expansion=2"])
def test_who_names_a_sampler_gets_sampled_softmax(override: str) -> None:
    assert resolved(override).loss.name == "sampled-softmax"


def test_what_is_given_stays() -> None:
    config = resolved("model.dropout=0.1", "loss.temperature=0.07", "loss.name=bce")
    assert (config.model.dropout, config.loss.temperature, config.loss.name) == (0.1, 0.07, "bce")


def test_a_resolved_config_stays_as_it_is_on_other_data(tmp_path: Any) -> None:
    first = resolved(num_events=10_000)
    (tmp_path / "config.yaml").write_text(dump_config(first))
    again = load_config(tmp_path / "config.yaml")
    assert again.defaults == "fixed"
    sizes: dict[str, Any] = {"num_sequences": 6000, "typical_length": 40, "longest_length": 90}
    assert resolve(again, num_items=3000, num_events=10**7, **sizes) == first


def test_other_recipes_do_not_follow_the_data() -> None:
    recipe = load_config("ml-1m/hstu")
    config = resolve(recipe, num_items=3706, num_events=10, num_sequences=6000, typical_length=40, longest_length=90)
    assert (config.model.dropout, config.loss) == (recipe.model.dropout, recipe.loss)


@pytest.mark.parametrize(("covering", "longest", "wanted"), [(1, 90, 16), (17, 90, 32), (64, 90, 64), (65, 90, 90)])
def test_histories_are_read_as_far_back_as_most_events_lie(covering: int, longest: int, wanted: int) -> None:
    assert resolved(covering_length=covering, longest_length=longest).model.max_len == wanted


def test_very_long_histories_are_cut() -> None:
    assert resolved(covering_length=3000, longest_length=9000).model.max_len == 512


def test_the_vaguer_the_tastes_the_softer_the_loss() -> None:
    found = [resolved(popularity_strength=strength).loss.temperature for strength in (None, 0.1, 0.5, 0.9)]
    assert found == sorted(found) and found[0] == found[1] < found[2] < found[3]


def test_a_large_log_has_a_sharp_loss_whatever_popularity_explains() -> None:
    assert resolved(num_events=SMALL, popularity_strength=0.9).loss.temperature == 0.05


def test_epochs_fall_with_the_work_of_one() -> None:
    found = [resolved(num_events=events).train.epochs for events in (10**3, 10**5, 2 * 10**5, 10**8)]
    assert found[0] == MOST_EPOCHS and found[-1] == FEWEST_EPOCHS and found == sorted(found, reverse=True)
    assert resolved(num_events=200_000, num_items=5000).train.epochs == round(TRAINING_SECONDS / (15.5e-6 * 200_000))


def test_who_gives_steps_or_epochs_gets_them() -> None:
    assert resolved("train.epochs=3").train.epochs == 3
    given = resolved("train.steps=7", "train.epochs=null").train
    assert (given.steps, given.epochs) == (7, None)


def test_events_beyond_the_longest_window_cost_no_epochs() -> None:
    sizes = {"num_events": 326_000, "num_items": 40_000}
    all_events, reachable = resolved(**sizes), resolved(**sizes, reachable_events=163_000)
    assert reachable.train.epochs == pytest.approx(2 * all_events.train.epochs, abs=1)
    split = resolved("data.window=split", **sizes, reachable_events=163_000)
    assert split.train.epochs == all_events.train.epochs, "split windows train on all of them"
