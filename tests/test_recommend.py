from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import turbogr
from tests.stores import draw_histories, write_store
from turbogr.data.batching import Batch
from turbogr.data.split import Split
from turbogr.errors import Note, UserError
from turbogr.evaluation.scorer import ModelScorer
from turbogr.recommend import Recommender

NUM_ITEMS = 40
MAX_LEN = 6


class TimeEncoder:
    """A query made of all that a history is: its items, their times and the time of the request."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        generator = torch.Generator().manual_seed(5)
        self.matrix = F.normalize(torch.randn(num_items, 8, generator=generator), dim=1)
        self.batches: list[Batch] = []

    columns: ClassVar[dict[str, str]] = {}

    @property
    def num_items(self) -> int:
        return len(self.matrix)

    def item_rows(self, start: int, stop: int) -> Tensor:
        return self.matrix[start:stop]

    def encode_last(self, batch: Batch) -> Tensor:
        assert (batch.items.lengths > 0).all()
        self.batches.append(batch)
        weight = 1 / (1 + (batch.next_times - batch.times).double().log1p())
        vectors = self.matrix[batch.items.values].double() * weight[:, None]
        sums = torch.zeros(batch.num_sequences, 8, dtype=torch.float64)
        return F.normalize(sums.index_add_(0, batch.items.row_index(), vectors), dim=1).float()


@pytest.fixture
def recommender(tmp_path: Path) -> Recommender:
    store = write_store(tmp_path / "store", draw_histories(0, 150, NUM_ITEMS), NUM_ITEMS)
    return Recommender(ModelScorer(TimeEncoder(), MAX_LEN), store, Split.of(store))


def history_of(recommender: Recommender, user: int) -> list[tuple[str, int]]:
    store = recommender.store
    events = slice(int(store.offsets[user]), int(store.offsets[user + 1]))
    return [
        (f"item-{item:03d}", int(time)) for item, time in zip(store.items[events], store.times[events], strict=True)
    ]


def lists_of(recommender: Recommender, **options: Any) -> dict[int, list[tuple[str, float]]]:
    lists: dict[int, list[tuple[str, float]]] = {}
    for some in recommender.recommend_batches(**options):
        for user, item, position, score in zip(some.user_ids, some.item_ids, some.positions, some.scores, strict=True):
            lists.setdefault(int(user), []).append((item, float(score)))
            assert len(lists[int(user)]) == position
    return lists


def test_a_history_gets_what_its_user_gets(recommender: Recommender) -> None:
    histories = [history_of(recommender, user) for user in range(150)]
    by_history = recommender.recommend(histories, k=7)
    by_user = lists_of(recommender, k=7)
    assert sorted(by_user) == list(range(100, 250))
    for user, found in enumerate(by_history):
        assert [item for item, _ in found] == [item for item, _ in by_user[100 + user]]
        assert [score for _, score in found] == pytest.approx([score for _, score in by_user[100 + user]], abs=1e-6)


def test_lists_are_the_best_unseen_items(recommender: Recommender) -> None:
    history = history_of(recommender, 3)
    (found,) = recommender.recommend([history], k=NUM_ITEMS)
    encoder = recommender.scorer.encoder
    assert isinstance(encoder, TimeEncoder)
    scores = encoder.matrix @ encoder.encode_last(encoder.batches[-1])[0]
    wanted = sorted(range(NUM_ITEMS), key=lambda row: (-float(scores[row]), row))
    seen = {item for item, _ in history}
    assert [item for item, _ in found] == [f"item-{row:03d}" for row in wanted if f"item-{row:03d}" not in seen]
    (everything,) = recommender.recommend([history], k=NUM_ITEMS + 100, filter_seen=False)
    assert [item for item, _ in everything] == [f"item-{row:03d}" for row in wanted]
    assert [score for _, score in everything] == sorted((score for _, score in everything), reverse=True)


def test_the_model_reads_the_last_events_in_order_of_time(recommender: Recommender) -> None:
    history = [(f"item-{row:03d}", 1000 + 10 * row) for row in range(20)]
    shuffled = [history[place] for place in np.random.default_rng(0).permutation(20)]
    assert recommender.recommend([shuffled]) == recommender.recommend([history])
    encoder = recommender.scorer.encoder
    assert isinstance(encoder, TimeEncoder)
    for batch in encoder.batches:
        assert batch.items.values.tolist() == list(range(20 - MAX_LEN, 20))
        assert batch.next_times.tolist() == [*range(1150, 1200, 10), 1190]
    (found,) = recommender.recommend([history], k=NUM_ITEMS)
    assert {item for item, _ in found} == {f"item-{row:03d}" for row in range(20, NUM_ITEMS)}, "all 20 are seen"


def test_times_come_in_many_forms(recommender: Recommender) -> None:
    moment = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.timezone.utc)
    seconds = int(moment.timestamp())
    forms: list[Any] = [
        seconds,
        float(seconds) + 0.25,
        moment,
        moment.replace(tzinfo=None),
        moment.astimezone(datetime.timezone(datetime.timedelta(hours=5))),
        np.datetime64("2024-05-01T12:00:00.250"),
        np.int64(seconds),
        "2024-05-01T12:00:00Z",
        str(seconds),
    ]
    for form in forms:
        recommender.recommend([[("item-001", form)]], at=form)
    encoder = recommender.scorer.encoder
    assert isinstance(encoder, TimeEncoder)
    assert [batch.times.tolist() for batch in encoder.batches] == [[seconds]] * len(forms)
    assert [batch.next_times.tolist() for batch in encoder.batches] == [[seconds]] * len(forms)


def test_the_time_of_the_request_counts(recommender: Recommender) -> None:
    history = [("item-001", 100), ("item-002", 5000)]
    one, two = recommender.recommend([history, history], at=[5000, 9000])
    assert recommender.recommend([history]) == [one]
    assert recommender.recommend([history], at=9000) == [two]
    assert one != two
    with pytest.raises(UserError, match="request at 4999 lies before its last event at 5000"):
        recommender.recommend([history], at=4999)
    with pytest.raises(UserError, match="3 times for 1 histories"):
        recommender.recommend([history], at=[1, 2, 3])
    with pytest.raises(UserError, match="before the last event of user"):
        list(recommender.recommend_batches(at=30))


def test_unknown_items_are_never_dropped_silently(recommender: Recommender) -> None:
    history = [("item-001", 10), ("soap", 20), ("item-002", 30), ("soap", 40)]
    known = [("item-001", 10), ("item-002", 30)]
    with pytest.warns(UserWarning, match="2 of 4 events are of items that the model does not know, such as 'soap'"):
        found = recommender.recommend([history])
    assert found == recommender.recommend([history], unknown="skip")
    assert found == recommender.recommend([known], at=40)
    with pytest.raises(UserError, match="2 of 4 events"):
        recommender.recommend([history], unknown="raise")
    with pytest.raises(UserError, match="choose from"):
        recommender.recommend([history], unknown="ignore")  # type: ignore[arg-type]


def test_without_a_known_item_popularity_steps_in_and_says_so(recommender: Recommender) -> None:
    counts = recommender.store.item_counts(recommender.split.train_end)
    wanted = sorted(range(NUM_ITEMS), key=lambda row: (-counts[row], row))[:4]
    with pytest.warns(
        UserWarning, match=r"2 of 3 histories have no item that the model knows \(the first is number 0\)"
    ):
        found = recommender.recommend([[], [("item-001", 1)], [("soap", 1)]], k=4, unknown="skip")
    with pytest.warns(UserWarning, match=r"\(the first is that of user 'n'\)"):
        recommender.recommend({"m": ["item-001"], "n": []})
    expected = [(f"item-{row:03d}", pytest.approx(counts[row] / counts.sum(), rel=1e-6)) for row in wanted]
    assert found[0] == found[2] == expected
    assert found[1] == recommender.recommend([[("item-001", 1)]], k=4)[0]
    found[0].clear()
    assert found[2], "lists must not be shared"
    assert recommender.recommend([]) == []


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        ([("item-001", 5), ("item-002", 6)], "history 0, event 0 is 'item-001', not an"),
        (["ab"], "history 0 is 'ab'"),
        ([7], "history 0 is 7"),
        ([[("item-001", 5, 6)]], "not an .item, time. pair"),
        ([[], [("item-001", None)]], "history 1, event 0: cannot read None as a time"),
        ([[("item-001", "noon")]], "cannot read 'noon'"),
        ([[("item-001", float("nan"))]], "cannot read nan"),
        ([[("item-001", True)]], "cannot read True"),
        ([[("item-001", -1)]], "before 1970"),
        ([[("item-001", 1_700_000_000_000)]], "not another unit"),
    ],
)
def test_histories_that_cannot_be_read_are_refused(recommender: Recommender, histories: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recommender.recommend(histories=histories)


def test_positions_have_their_name_of_0_1_0_too(recommender: Recommender) -> None:
    (some,) = recommender.recommend_batches(k=3)
    with pytest.warns(DeprecationWarning, match=r"ranks is now Recommendations\.positions"):
        assert some.ranks is some.positions


def test_positions_need_no_times(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [[0, 1, 2], [3, 2, 1]], 5, real_times=False)
    encoder = TimeEncoder(5)
    recommender = Recommender(ModelScorer(encoder, MAX_LEN), store, Split.of(store))
    (found,) = recommender.recommend([[("item-000", None), ("item-001", None), ("item-002", None)]], k=2)
    assert encoder.batches[0].times.tolist() == [0, 1, 2]
    assert encoder.batches[0].next_times.tolist() == [1, 2, 3]
    assert lists_of(recommender, k=2)[100] == found


def test_chosen_users_keep_their_order_and_unknown_ones_are_reported(recommender: Recommender) -> None:
    everyone = lists_of(recommender, k=3)
    chosen = lists_of(recommender, users=[140, "101", 120], k=3)
    assert list(chosen) == [140, 101, 120]
    assert all([item for item, _ in chosen[user]] == [item for item, _ in everyone[user]] for user in chosen)
    with pytest.raises(UserError, match=r"4 of 5 users are not in .*: 1, 2, 3, \.\.\.;"):
        recommender.recommend_batches([101, 1, 2, 3, 4])
    with pytest.warns(UserWarning, match="1 of 2 users are not in"):
        assert list(lists_of(recommender, users=[101, 1], unknown="warn")) == [101]
    assert lists_of(recommender, users=[1], unknown="skip") == {}


@pytest.mark.parametrize("batch_size", [1, 64, 100, 1000])
def test_batch_size_changes_nothing_and_progress_adds_up(recommender: Recommender, batch_size: int) -> None:
    steps: list[int] = []
    assert lists_of(recommender, batch_size=batch_size, progress=steps.append) == lists_of(recommender)
    assert sum(steps) == 150


def test_users_without_events_get_the_popular_items(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [[0, 1, 1, 1, 2], [], [3, 1, 2]], 5)
    recommender = Recommender(ModelScorer(TimeEncoder(5), MAX_LEN), store, Split.of(store))
    lists = lists_of(recommender, k=5)
    assert [item for item, _ in lists[101]] == ["item-001", "item-000", "item-003", "item-002", "item-004"]
    assert {item for item, _ in lists[100]} == {"item-003", "item-004"}


def test_similar_items(recommender: Recommender) -> None:
    encoder = recommender.scorer.encoder
    assert isinstance(encoder, TimeEncoder)
    cosines = encoder.matrix @ encoder.matrix[7]
    cosines[7] = -2
    found = recommender.similar_items("item-007", k=3)
    assert [item for item, _ in found] == [f"item-{row:03d}" for row in cosines.topk(3).indices]
    assert len(recommender.similar_items("item-007", k=1000)) == NUM_ITEMS - 1
    with pytest.raises(UserError, match="does not know the item 'soap'"):
        recommender.similar_items("soap")


@pytest.mark.parametrize("k", [NUM_ITEMS + 1, 10**9, 10**20])
def test_a_huge_k_is_the_whole_catalogue_with_a_note(recommender: Recommender, k: int) -> None:
    history = [("item-007", 1_700_000_000)]
    said = f"k is {k:,}, but there are {NUM_ITEMS} items"
    with pytest.warns(Note, match=said):
        assert len(recommender.recommend([history], k, filter_seen=False)[0]) == NUM_ITEMS
    with pytest.warns(Note, match=said):
        assert len(recommender.similar_items("item-007", k)) == NUM_ITEMS - 1
    with pytest.warns(Note, match=said):
        lists = list(recommender.recommend_batches(k=k, filter_seen=False))
    assert max(int(some.positions.max()) for some in lists) == NUM_ITEMS


def test_k_must_be_positive(recommender: Recommender) -> None:
    with pytest.raises(UserError, match="k is 0"):
        recommender.recommend([], k=0)
    with pytest.raises(UserError, match="k is -1"):
        recommender.recommend_batches(k=-1)
    with pytest.raises(UserError, match="k is 0"):
        recommender.similar_items("item-001", k=0)


@pytest.mark.parametrize("k", [1.5, 10.0, "10", True, None])
def test_k_must_be_a_whole_number(recommender: Recommender, k: Any) -> None:
    for ask in (
        lambda: recommender.recommend([], k=k),
        lambda: recommender.recommend_batches(k=k),
        lambda: recommender.similar_items("item-001", k=k),
    ):
        with pytest.raises(UserError, match=r"k is .*; give a whole number"):
            ask()
    assert len(recommender.similar_items("item-001", k=np.int64(3))) == 3  # type: ignore[arg-type]


def test_users_who_have_seen_everything_are_counted(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [[0, 1, 2, 3, 4], [], [3, 1, 2], [4, 3, 2, 1, 0]], 5)
    recommender = Recommender(ModelScorer(TimeEncoder(5), MAX_LEN), store, Split.of(store))
    assert sum(some.num_empty for some in recommender.recommend_batches(k=2, batch_size=2)) == 2
    assert sum(some.num_empty for some in recommender.recommend_batches(k=2, filter_seen=False)) == 0


def test_seen_items_are_recommended_as_they_were_measured_unless_a_call_says_otherwise(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [[0, 1, 2, 3], [3, 1, 2]], 5)
    measured = {
        filter_seen: Recommender(ModelScorer(TimeEncoder(5), MAX_LEN), store, Split.of(store), filter_seen=filter_seen)
        for filter_seen in (True, False)
    }
    history = [("item-000", 1), ("item-001", 2)]
    for given, by_default in ((None, 3), (True, 3), (False, 5)):
        assert len(measured[True].recommend([history], k=5, filter_seen=given)[0]) == by_default
        assert len(lists_of(measured[True], k=5, filter_seen=given)[100]) == (1 if by_default == 3 else 5)
    for given, by_default in ((None, 5), (True, 3), (False, 5)):
        assert len(measured[False].recommend([history], k=5, filter_seen=given)[0]) == by_default
        assert len(lists_of(measured[False], k=5, filter_seen=given)[100]) == (1 if by_default == 3 else 5)


def test_load_is_at_the_top_of_the_package_and_costs_nothing_until_used() -> None:
    script = (
        "import sys, turbogr; assert 'torch' not in sys.modules; assert turbogr.load.__module__ == 'turbogr.recommend'"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        turbogr.lode  # noqa: B018
