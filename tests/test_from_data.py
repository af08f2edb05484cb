"""`defaults: from-data`: what a recipe leaves open follows from the size of the data."""

from __future__ import annotations

from typing import Any

import pytest

from turbogr.config import Config, dump_config, load_config
from turbogr.config.from_data import FULL_SOFTMAX_WORK, SMALL
from turbogr.config.resolve import resolve
from turbogr.negatives import LossContext, make_loss


def resolved(*overrides: str, num_events: int = 20_000, num_items: int = 3000) -> Config:
    sizes: dict[str, Any] = {"num_sequences": 6000, "typical_length": 40, "longest_length": 90}
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
