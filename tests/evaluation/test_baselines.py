from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stores import draw_histories, write_store
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation import baselines
from turbogr.evaluation.baselines import markov_positions, popularity_positions
from turbogr.evaluation.evaluator import baseline_metrics
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.job_pool import Interrupted
from turbogr.evaluation.metrics import MISSED

MakeStore = Callable[..., Store]
fixtures_are_pure = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def definition(
    histories: list[list[int]], num_items: int, part: str, filter_seen: bool, weight: int
) -> tuple[list[int], list[int]]:
    """Ranks of both baselines under leave-two-out, from the formulas, one user and one item at a time."""
    back = {"test": 1, "valid": 2}[part]
    train = [history[: len(history) - {1: 0, 2: 1}.get(len(history), 2)] for history in histories]
    counts = np.bincount([item for history in train for item in history], minlength=num_items)
    follows = np.zeros((num_items, num_items), np.int64)
    for history in train:
        for first, second in itertools.pairwise(history):
            follows[first, second] += 1
    positions: tuple[list[int], list[int]] = ([], [])
    for history in histories:
        if len(history) < back + 1:
            continue
        target, before = history[-back], history[:-back]
        popular = {item: Fraction(int(counts[item]), int(counts.sum())) for item in range(num_items)}
        markov = {item: int(follows[before[-1], item]) + weight * popular[item] for item in range(num_items)}
        for scores, out in zip((popular, markov), positions, strict=True):
            gone = set(before) if filter_seen else set()
            best_first = sorted(set(range(num_items)) - gone, key=lambda item: (-scores[item], item))
            out.append(MISSED if target in gone else 1 + best_first.index(target))
    return positions


@given(
    seed=st.integers(0, 10**6),
    num_users=st.integers(2, 12),
    num_items=st.integers(1, 12),
    part=st.sampled_from(["valid", "test"]),
    weight=st.sampled_from([1, 3, 1000]),
    max_pairs=st.sampled_from([1, 7, 10**6]),
    max_events=st.sampled_from([1, 9, 10**6]),
)
@fixtures_are_pure
def test_baselines_follow_their_definitions(
    make_store: MakeStore,
    seed: int,
    num_users: int,
    num_items: int,
    part: str,
    weight: int,
    max_pairs: int,
    max_events: int,
) -> None:
    drawn = [*draw_histories(seed, num_users, num_items), [0, 0, num_items - 1]]
    store = make_store(drawn, num_items)
    split = Split.of(store)
    held_out = HeldOut.of(store, split, part)
    counts = store.item_counts(split.train_end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "MAX_PAIRS", max_pairs)
        patch.setattr(baselines, "MAX_EVENTS", max_events)
        popular = popularity_positions(held_out, counts)
        markov = markov_positions(held_out, split, counts, weight=weight)
    for place, filter_seen in enumerate((True, False)):
        wanted = definition(drawn, num_items, part, filter_seen, weight)
        assert popular[place].tolist() == wanted[0]
        assert markov[place].tolist() == wanted[1]


def test_held_out_users_are_accounted_for(make_store: MakeStore) -> None:
    store = make_store([[0], [1, 2], [0, 1, 2], [2, 1, 0, 1]], 3)
    split = Split.of(store)
    test, valid = HeldOut.of(store, split, "test"), HeldOut.of(store, split, "valid")
    assert test.users.tolist() == [1, 2, 3]
    assert test.skipped == {"no test event": 1}
    assert test.targets.tolist() == [2, 2, 1]
    assert valid.users.tolist() == [2, 3]
    assert valid.skipped == {"no valid event": 2}
    items, lengths = test.seen(1, 3)
    assert items.tolist() == [0, 1, 2, 1, 0]
    assert lengths.tolist() == [2, 3]
    with pytest.raises(UserError, match="evaluate the test part"):
        HeldOut.of(store, Split.of(store, "leave-one-out"), "valid")


@pytest.mark.parametrize("max_events", [1, 4, 5, 100])
def test_blocks_cover_every_user_once(make_store: MakeStore, max_events: int) -> None:
    store = make_store([[0] * length for length in (2, 9, 2, 3, 4, 2)], 1)
    held_out = HeldOut.of(store, Split.of(store), "test")
    blocks = held_out.blocks(max_events)
    assert [user for first, last in blocks for user in range(first, last)] == list(range(6))


def test_baselines_can_be_interrupted(make_store: MakeStore) -> None:
    store = make_store([[0, 1, 2, 0], [2, 1, 0, 1]], 3)
    split = Split.of(store)
    held_out = HeldOut.of(store, split, "test")
    counts = store.item_counts(split.train_end)

    def stop() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        popularity_positions(held_out, counts, stop=stop)
    with pytest.raises(Interrupted):
        markov_positions(held_out, split, counts, stop=stop)


@pytest.mark.skipif(
    "TURBOGR_TEST_DATA" not in os.environ, reason="TURBOGR_TEST_DATA does not name a folder of data sets"
)
def test_baselines_of_movielens_1m(tmp_path: Path) -> None:
    """Known figures of a public data set: a change of protocol, of ties or of the filter would move them."""
    ratings = Path(os.environ["TURBOGR_TEST_DATA"]) / "ml-1m" / "ratings.dat"
    table = np.loadtxt(ratings, np.int64, delimiter=":", usecols=(0, 2, 6))
    user, item, time = table[np.lexsort((np.arange(len(table)), table[:, 2], table[:, 0]))].T
    _, starts = np.unique(user, return_index=True)
    _, rows = np.unique(item, return_inverse=True)
    histories = [part.tolist() for part in np.split(rows, starts[1:])]
    times = [part.tolist() for part in np.split(time, starts[1:])]
    store = write_store(tmp_path / "store", histories, int(rows.max()) + 1, times=times)
    metrics = baseline_metrics(store, Split.of(store))
    assert [round(metrics["popularity"][name], 4) for name in ("hr@10", "hr@200")] == [0.0369, 0.3401]
    assert [round(metrics["markov"][name], 4) for name in ("hr@10", "hr@200")] == [0.2144, 0.5829]
