"""The whole way from a log to metrics: a tiny set is memorised to the last item, by the order of its events."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pandas as pd
import pytest

import turbogr as api
from turbogr.config import Config, DataConfig, EvaluateConfig, LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from turbogr.plugins import built_in_names
from turbogr.recommend import Recommender

NUM_ITEMS, NUM_PAIRS, LENGTH = 20, 30, 8
CUT = 1_700_000_000

RECIPE = Config(
    model=ModelConfig(dim=32, num_blocks=2, num_heads=2, max_len=LENGTH, dropout=0.0),
    loss=LossConfig(num_negatives=32),
    optimizer=OptimizerConfig(lr=5e-3),
    data=DataConfig(batch_size=30, split=f"time:{CUT}"),
    evaluate=EvaluateConfig(metric="hr@1", ks=(1, 10), every=10, filter_seen=False),
    train=TrainConfig(epochs=80, tensorboard=False),
)

Events = list[tuple[str, int]]


def pairs_of_users() -> tuple[list[Events], list[Events]]:
    """Two lists of users who did the same at the same pace; the second ones' last events lie after the cut."""
    chance = random.Random(0)
    first, second = [], []
    for _ in range(NUM_PAIRS):
        time, events = 0, []
        for _ in range(LENGTH):
            time += chance.randrange(1, 10_000)
            events.append((f"item {chance.randrange(NUM_ITEMS)}", time))
        first.append([(item, CUT - 10**6 + moment) for item, moment in events])
        second.append([(item, CUT - time + moment) for item, moment in events])
    return first, second


def shuffled(users: list[Events]) -> list[Events]:
    """The same with the items before the last in another order."""
    chance = random.Random(1)
    others = []
    for events in users:
        items = [item for item, _ in events[:-1]]
        chance.shuffle(items)
        others.append([(item, time) for item, (_, time) in zip(items, events, strict=False)] + events[-1:])
    return others


def hit_rate(recommender: Recommender, users: list[Events]) -> float:
    """HR@1 of every user's last item, recommended at its time from the events before it."""
    targets = [events[-1] for events in users]
    histories = [events[:-1] for events in users]
    found = recommender.recommend(histories, k=1, filter_seen=False, at=[time for _, time in targets])
    return sum(listed[0][0] == item for listed, (item, _) in zip(found, targets, strict=True)) / len(users)


LOSSES = {
    "full-softmax": LossConfig(name="full-softmax"),
    "bce": LossConfig(name="bce", num_negatives=16, temperature=0.1),
    "gbce": LossConfig(name="gbce", num_negatives=16, temperature=0.1),
}


@pytest.mark.parametrize("name", built_in_names("block"))
@pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")
def test_a_tiny_set_is_memorised_from_log_to_metrics(name: str, tmp_path: Path) -> None:
    assert_memorised(dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, name=name)), tmp_path)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")
def test_every_loss_memorises_it(loss: LossConfig, tmp_path: Path) -> None:
    assert_memorised(dataclasses.replace(RECIPE, loss=loss), tmp_path)


def assert_memorised(recipe: Config, folder: Path) -> None:
    first, second = pairs_of_users()
    rows = [(user, item, time) for user, events in enumerate(first + second) for item, time in events]
    table = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])
    api.prepare_table(table, folder / "data", split=recipe.data.split)
    api.train(recipe, folder / "data", folder / "run")

    measured = api.evaluate(folder / "run")
    assert measured.num_users == NUM_PAIRS
    assert measured.metrics["hr@1"] == measured.metrics["mrr"] == 1.0
    assert measured.baselines["markov"]["hr@1"] < 0.5, "the newest item alone must not tell"
    recommender = api.load(folder / "run")
    assert hit_rate(recommender, second) == 1.0
    assert hit_rate(recommender, shuffled(second)) < 0.6
