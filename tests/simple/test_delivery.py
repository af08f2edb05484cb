"""What a run delivers: the best on validation, kept in delivered.json."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.simple import plain
from turbogr.data.split import Split
from turbogr.errors import UserError
from turbogr.evaluation.item_ranking import MatrixScores
from turbogr.evaluation.job_pool import Interrupted
from turbogr.simple.delivery import DELIVERED, MODEL, Component, Delivered, choose_delivered, label_of
from turbogr.simple.methods import METHODS
from turbogr.simple.selection import choose_methods
from turbogr.simple.training_events import TrainingEvents
from turbogr.simple.validation import Validation, criterion

NUM_ITEMS = 60
NAMES = ("popularity", "skip-markov")


class Oracle:
    """A model that knows the validation items of users whose number is in `known`; otherwise it guesses."""

    num_items, num_workers, batch_size = NUM_ITEMS, 1, 64

    def __init__(self, store, known):
        self.store, self.known = store, set(known)

    def score(self, histories, step):
        generator = np.random.default_rng(0)
        values = 0.1 * generator.random((len(histories.users), NUM_ITEMS)).astype(np.float32)
        for row, (user, end) in enumerate(zip(histories.users, histories.ends, strict=True)):
            if user in self.known:
                values[row, self.store.items[end]] = 1.0
        step(len(values))
        return MatrixScores(torch.from_numpy(values))


@pytest.fixture
def chain(make_store):
    """A log in which item i is followed by i + 7, for every second user; the others draw items."""
    generator = np.random.default_rng(1)
    starts = generator.integers(0, NUM_ITEMS, 240)
    logs = [[int(start + 7 * place) % NUM_ITEMS for place in range(6)] for start in starts]
    logs[1::2] = [generator.integers(0, NUM_ITEMS, 6).tolist() for _ in logs[1::2]]
    return make_store(logs, NUM_ITEMS)


def chosen(store, known, names=NAMES, **options):
    split = Split.of(store)
    selection = choose_methods(store, split, seen_out=False, names=names)
    model = Oracle(store, known)
    return choose_delivered(model, "hstu", selection, store, split, seen_out=False, **options), model, selection


def test_a_markov_chain_is_delivered_where_it_wins(chain):
    delivered, _, selection = chosen(chain, known=[])
    assert delivered.label == "Markov chain over skips" and not delivered.needs_model
    assert [component.name for component in delivered.components] == ["skip-markov"]
    assert delivered.components[0].settings == selection.methods["skip-markov"].settings
    assert delivered.chosen_on == "the validation items"
    assert set(delivered.values) == {"hstu", "most popular", "Markov chain over skips"}
    assert max(delivered.values, key=delivered.values.get) == delivered.label


def test_the_model_is_delivered_where_it_wins(chain):
    delivered, _, _ = chosen(chain, known=range(240))
    assert delivered.is_model and delivered.label == "hstu" and delivered.values["hstu"] == 1.0
    assert delivered.components == (Component(MODEL),)


def test_a_sum_is_delivered_where_it_is_better_than_its_parts(chain):
    delivered, model, _ = chosen(chain, known=range(1, 240, 2))
    assert {component.name for component in delivered.components} == {MODEL, "skip-markov"}
    assert not delivered.is_model and delivered.needs_model
    assert sum(component.share for component in delivered.components) == pytest.approx(1)
    assert "hstu" in delivered.label and "Markov chain over skips" in delivered.label and " + " in delivered.label
    scales = {component.name: component.scale for component in delivered.components}
    assert scales[MODEL] is None and scales["skip-markov"] > 0  # counts are compressed, the model's scores are not
    shares = [component.share for component in delivered.components]
    assert shares == sorted(shares, reverse=True)
    best = delivered.values[delivered.label]
    assert best == max(delivered.values.values())
    assert best > 1.01 * max(delivered.values["hstu"], delivered.values["Markov chain over skips"])
    split = Split.of(chain)
    scorer = delivered.scorer(model, chain, split)
    validation = Validation.of(chain, split, seen_out=False)
    assert criterion(validation.positions(scorer)) == pytest.approx(best, abs=1e-6)


def test_a_sum_of_three_is_fitted_again_to_the_same_scores(chain):
    split = Split.of(chain)
    parts = [("ease", 0.5), ("skip-markov", 2.0), ("item-knn", 1.0)]
    settings = {name: {key: v[0] for key, v in METHODS[name].choices(NUM_ITEMS).items()} for name, _ in parts}
    delivered = Delivered("three", tuple(Component(name, weight, 1 / 3, settings[name]) for name, weight in parts))
    histories = [[1, 8], [5]]
    scorer = delivered.scorer(None, chain, split)
    events = TrainingEvents.of(chain, split)
    single = [weight * plain.scores_of(METHODS[name].fit(events, settings[name]), histories) for name, weight in parts]
    np.testing.assert_allclose(plain.scores_of(scorer, histories), sum(single), rtol=1e-5)
    again = plain.scores_of(delivered.scorer(None, chain, split), histories)
    assert np.array_equal(plain.scores_of(scorer, histories), again)


def test_a_method_that_is_fitted_already_is_not_fitted_again_unless_its_settings_differ(chain):
    delivered, model, selection = chosen(chain, known=[])
    used = delivered.scorer(model, chain, Split.of(chain), fitted=selection.methods)
    assert used is selection.methods["skip-markov"].scorer
    other = dict(delivered.components[0].settings, decay=0.123)
    changed = Delivered("other", (Component("skip-markov", settings=other),))
    assert changed.scorer(model, chain, Split.of(chain), fitted=selection.methods).decay == 0.123


def test_without_validation_items_the_model_is_delivered(make_store):
    store = make_store([[1, 2, 3], [2, 3, 4]], NUM_ITEMS, split="leave-one-out")
    delivered, _, _ = chosen(store, known=[])
    assert delivered.is_model and delivered.chosen_on == "nothing: the split has no validation items"
    assert delivered.values == {}


def test_choosing_can_be_stopped(chain):
    with pytest.raises(Interrupted):
        chosen(chain, known=[], should_stop=lambda: True)


def test_it_is_read_as_it_was_written(chain, tmp_path):
    delivered, _, _ = chosen(chain, known=range(1, 240, 2))
    delivered.write(tmp_path)
    assert Delivered.read(tmp_path, "hstu") == delivered


def test_a_run_without_the_file_delivers_its_model(tmp_path):
    delivered = Delivered.read(tmp_path, "fuxi")
    assert delivered.is_model and delivered.label == "fuxi"


def written(tmp_path, **changes):
    Delivered("EASE", (Component("ease", settings={"l2": 1.0, "popularity_weight": 0.1}),)).write(tmp_path)
    record = json.loads((tmp_path / DELIVERED).read_text())
    for key, value in changes.items():
        if key in record:
            record[key] = value
        else:
            record["components"][0][key] = value
    (tmp_path / DELIVERED).write_text(json.dumps(record))


def test_the_plain_file_is_read(tmp_path):
    written(tmp_path)
    assert Delivered.read(tmp_path, "hstu").components[0].settings == {"l2": 1.0, "popularity_weight": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        {"components": []},
        {"components": None},
        {"components": [{"name": "ease"}]},
        {"weight": "much"},
        {"weight": float("nan")},
        {"scale": 0.0},
        {"scale": "small"},
        {"settings": {"l2": 1.0}},
        {"settings": {"l2": "high", "popularity_weight": 0.1}},
        {"settings": {"l2": 1.0, "popularity_weight": 0.1, "other": 1.0}},
        {"values": {"hstu": None}},
        {"values": 3},
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, changes):
    written(tmp_path, **changes)
    with pytest.raises(UserError, match=r"delivered\.json is damaged; remove it to use the trained model alone"):
        Delivered.read(tmp_path, "hstu")


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", "{}"])
def test_a_file_that_holds_something_else_is_damaged(tmp_path, content):
    (tmp_path / DELIVERED).write_text(content)
    with pytest.raises(UserError, match=r"delivered\.json is damaged"):
        Delivered.read(tmp_path, "hstu")


def test_a_file_without_scales_sums_scores_as_they_are(tmp_path):
    written(tmp_path)
    record = json.loads((tmp_path / DELIVERED).read_text())
    del record["components"][0]["scale"]
    (tmp_path / DELIVERED).write_text(json.dumps(record))
    assert Delivered.read(tmp_path, "hstu").components[0].scale is None


def test_a_label_names_three_components_and_counts_the_others():
    parts = [Component(name, share=share) for name, share in zip("abcde", (0.4, 0.3, 0.1, 0.1, 0.1), strict=True)]
    titles = {name: name.upper() for name in "abcde"}
    assert label_of(parts, titles) == "40% A + 30% B + 10% C + 2 more"
    assert label_of(parts[:3], titles) == "40% A + 30% B + 10% C"
    assert label_of(parts[:1], titles) == "A"


def test_a_method_of_another_release_is_named(tmp_path):
    written(tmp_path, name="slim")
    with pytest.raises(
        UserError, match=r"names the method 'slim', which this turbogr does not have; it has popularity"
    ):
        Delivered.read(tmp_path, "hstu")
