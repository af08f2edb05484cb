"""Whom `recommend` can be asked for, what it may return, and in which form."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from tests.stores import draw_histories, write_store
from tests.test_recommend import MAX_LEN, NUM_ITEMS, TimeEncoder, history_of
from turbogr.data.histories import TypicalTimes
from turbogr.data.split import Split
from turbogr.errors import Note, UserError
from turbogr.evaluation.item_ranking import MatrixScores, Scores
from turbogr.evaluation.scorer import ModelScorer
from turbogr.evaluation.user_histories import UserHistories
from turbogr.recommend import Recommender


@pytest.fixture
def recommender(tmp_path: Path) -> Recommender:
    store = write_store(tmp_path / "store", draw_histories(0, 150, NUM_ITEMS), NUM_ITEMS)
    return Recommender(ModelScorer(TimeEncoder(), MAX_LEN), store, Split.of(store))


def items_of(lists: Any) -> list[list[str]]:
    return [[item for item, _ in ranked] for ranked in lists]


def flat(lists: list[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(lists))


TABLES = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "arrow": pa.table}
KINDS: dict[str, Any] = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "arrow": pa.Table}


def columns_of(table: Any) -> dict[str, list[Any]]:
    return (
        pa.table(table).to_pydict() if isinstance(table, pa.Table) else {c: table[c].to_list() for c in table.columns}
    )


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_users_gets_a_table_of_the_same_kind(recommender: Recommender, kind: str) -> None:
    lists = recommender.recommend([140, 101], k=3)
    for users in (TABLES[kind]({"user_id": [140, 101]}), TABLES[kind]({"who": [140, 101]})):
        found = recommender.recommend(users, k=3)
        assert isinstance(found, KINDS[kind])
        read = columns_of(found)
        assert list(read) == ["user_id", "item_id", "rank", "score"]
        assert read["user_id"] == [140] * 3 + [101] * 3
        assert read["rank"] == [1, 2, 3] * 2
        assert read["item_id"] == [item for ranked in lists for item, _ in ranked]
        assert read["score"] == pytest.approx([score for ranked in lists for _, score in ranked])


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("names", [("user", "item", "time"), ("visitorid", "sku", "ts")])
def test_a_table_of_events_is_histories_by_user(recommender: Recommender, kind: str, names: tuple[str, ...]) -> None:
    histories = {f"new-{user}": history_of(recommender, user) for user in (7, 3, 5)}
    events = [(user, item, time) for user, history in histories.items() for item, time in history]
    events = [events[place] for place in np.random.default_rng(1).permutation(len(events))]
    table = TABLES[kind]({name: [event[k] for event in events] for k, name in enumerate(names)})
    found = recommender.recommend(table, k=4)
    assert isinstance(found, KINDS[kind])
    read = columns_of(found)
    wanted = recommender.recommend(histories, k=4)
    assert isinstance(wanted, dict) and list(wanted) == list(histories)
    order = list(dict.fromkeys(user for user, _, _ in events))
    assert read["user_id"] == [user for user in order for _ in range(4)], "users in the order of their first event"
    assert read["item_id"] == [item for user in order for item, _ in wanted[user]]


def test_columns_of_a_table_may_be_named_and_mistakes_are_pointed_out(recommender: Recommender) -> None:
    table = pd.DataFrame({"a": ["x"], "b": ["item-001"], "c": [50]})
    found = recommender.recommend(table, k=2, user_column="a", item_column="b", time_column="c")
    assert found["user_id"].tolist() == ["x", "x"]
    with pytest.raises(UserError, match=r"which column of the table of users has the users\? .*'a', 'b', 'c'"):
        recommender.recommend(table)
    with pytest.raises(UserError, match=r"has no column 'bb' \(--item-column\)"):
        recommender.recommend(table, item_column="bb")
    with pytest.raises(UserError, match="'user' and 'uid' both look like the user"):
        recommender.recommend(pd.DataFrame({"user": [1], "uid": [2], "item": ["item-001"]}))
    with pytest.raises(UserError, match=r"column 'item' of the table of events, number 1, has no id"):
        recommender.recommend(pd.DataFrame({"user": [1, 1], "item": ["item-001", None]}))
    with pytest.raises(UserError, match=r"row 2 of the table: the time 'noon'"):
        recommender.recommend(pd.DataFrame({"user": [1, 1], "item": ["item-001"] * 2, "time": ["2024-01-01", "noon"]}))


@pytest.mark.filterwarnings("ignore:1 of 3 histories")
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_may_have_a_history_per_record(recommender: Recommender, kind: str) -> None:
    items, times = [["item-001", "item-002"], [], ["item-005"]], [[70, 60], [], [80]]
    plain = recommender.recommend(histories=items, k=3)
    found = recommender.recommend(TABLES[kind]({"user": ["a", "b", "a"], "item": items}), k=3)
    assert columns_of(found)["user_id"] == ["a"] * 3 + ["b"] * 3 + ["a"] * 3
    assert columns_of(found)["item_id"] == [item for ranked in plain for item, _ in ranked]
    timed = TABLES[kind]({"user": ["a", "b", "c"], "item": items, "time": times})
    pairs = [list(zip(*pair, strict=True)) for pair in zip(items, times, strict=True)]
    assert recommender.recommend(timed, k=3, output="lists") == recommender.recommend(histories=pairs, k=3)
    for wrong in ([[70], [], [80]], [70, 60, 50]):
        with pytest.raises(UserError, match=r"needs a list of as many times; or give a record per event"):
            recommender.recommend(TABLES[kind]({"user": ["a", "b", "c"], "item": items, "time": wrong}))


def test_a_column_of_lists_has_histories(recommender: Recommender) -> None:
    items = [["item-001", "item-002"], ["item-005"]]
    wanted = recommender.recommend(items, k=3)
    for column in (pd.Series(items), pl.Series(items), pa.array(items), pa.chunked_array([items])):
        assert recommender.recommend(column, k=3) == wanted


def test_events_whose_items_have_no_usual_name_are_not_taken_for_users(recommender: Recommender) -> None:
    table = pd.DataFrame({"user": ["x", "y"], "thing": ["item-001", "item-002"]})
    with pytest.raises(UserError, match=r"if it has events, name their items with --item-column.*'user', 'thing'"):
        recommender.recommend(table)
    assert len(recommender.recommend(table, k=2, item_column="thing")) == 4
    users = pd.DataFrame({"user": [101], "age": [30]})
    assert recommender.recommend(users, k=2)["user_id"].tolist() == [101, 101]


@pytest.mark.filterwarnings("error")
def test_lazy_frames_are_read_without_a_warning(recommender: Recommender) -> None:
    events = pl.DataFrame({"user": ["x"], "item": ["item-001"], "time": [50]})
    found = recommender.recommend(events.lazy(), k=2)
    assert isinstance(found, pl.DataFrame) and found.equals(recommender.recommend(events, k=2))


def test_times_of_a_table_come_in_many_forms(recommender: Recommender) -> None:
    moments = [
        datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.timezone.utc) + datetime.timedelta(hours=h) for h in (1, 0)
    ]
    seconds = [int(moment.timestamp()) for moment in moments]
    forms: list[Any] = [
        seconds,
        [second * 1000 for second in seconds],
        [float(second) for second in seconds],
        [moment.isoformat() for moment in moments],
        moments,
    ]
    encoder = recommender.scorer.encoder  # type: ignore[attr-defined]
    for form in forms:
        table = pl.DataFrame({"user": [1, 1], "item": ["item-002", "item-001"], "time": form})
        recommender.recommend(table, k=2)
        assert encoder.batches[-1].items.values.tolist() == [1, 2], "in the order of time"
        assert encoder.batches[-1].times.tolist() == seconds[::-1]


def test_histories_without_times_get_typical_ones(recommender: Recommender) -> None:
    store, encoder = recommender.store, recommender.scorer.encoder  # type: ignore[attr-defined]
    newest = int(np.asarray(store.times).max())
    assert TypicalTimes.of(store) == TypicalTimes(newest, tuple(60 * step for step in range(20)))
    timed = [("item-001", newest - 120), ("item-005", newest - 60), ("item-009", newest)]
    plain = ["item-001", "item-005", "item-009"]
    assert recommender.recommend([plain], k=5) == recommender.recommend([timed], k=5)
    assert recommender.recommend([np.array(plain)], k=5) == recommender.recommend([timed], k=5)
    table = pd.DataFrame({"user": ["n"] * 3, "item": plain})
    assert recommender.recommend(table, k=5, output="lists") == recommender.recommend([timed], k=5)
    recommender.recommend([plain], at=10_000)
    assert encoder.batches[-1].times.tolist() == [9_880, 9_940, 10_000]
    recommender.recommend([plain], at=70)
    assert encoder.batches[-1].times.tolist() == [0, 10, 70], "no time before 1970"
    recommender.recommend(table, at=10_000)
    assert encoder.batches[-1].times.tolist() == [9_880, 9_940, 10_000]


def test_typical_times_do_not_reach_from_user_to_user(tmp_path: Path) -> None:
    times = [[0, 10, 20], [], [5_000], [1_000, 1_010, 9_000], [0, 20, 40, 70]]
    store = write_store(tmp_path / "store", [[0, 1, 2], [], [1], [2, 1, 0], [0, 1, 2, 0]], 3, times=times)
    typical = TypicalTimes.of(store)
    assert typical == TypicalTimes(9_000, (0, 30, 50, 70)), "medians of 10, 30, 7990; of 20, 50, 8000; and 70"
    assert typical.before(1_000, 6).tolist() == [884, 907, 930, 950, 970, 1_000], "older ones go on evenly"
    single = write_store(tmp_path / "single", [[0], [1]], 3, times=[[4], [7]])
    assert TypicalTimes.of(single) == TypicalTimes(7, (0,))
    assert TypicalTimes.of(single).before(7, 3).tolist() == [7, 7, 7]


def test_typical_ages_never_fall_and_are_of_some_users_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [[0, 900], [0, 800], [0, 1, 2]]
    store = write_store(tmp_path / "store", [[0, 1], [1, 2], [2, 1, 0]], 3, times=times)
    assert TypicalTimes.of(store).ages == (0, 800, 800)
    monkeypatch.setattr("turbogr.data.histories._SAMPLED_EVENTS", 2)
    assert TypicalTimes.of(store) == TypicalTimes(900, (0, 900))
    monkeypatch.setattr("turbogr.data.histories._MOST_AGES", 1)
    assert TypicalTimes.of(store).ages == (0,)


def test_positions_need_no_times_in_tables_and_lists(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [[0, 1, 2], [3, 2, 1]], 5, real_times=False)
    encoder = TimeEncoder(5)
    recommender = Recommender(ModelScorer(encoder, MAX_LEN), store, Split.of(store))
    wanted = recommender.recommend([100], k=2)
    assert recommender.recommend([["item-000", "item-001", "item-002"]], k=2) == wanted
    table = pd.DataFrame({"user": [1] * 3, "item": ["item-002", "item-000", "item-001"], "time": [30, 10, 20]})
    assert recommender.recommend(table, k=2, output="lists") == wanted
    assert encoder.batches[-1].times.tolist() == [0, 1, 2]


def test_users_come_in_many_forms(recommender: Recommender) -> None:
    wanted = recommender.recommend([101, 140], k=3)
    forms: list[Any] = [
        ["101", "140"],
        (101, 140),
        np.array([101, 140]),
        np.array(["101", "140"], object),
        [101, "140"],
        iter([101, 140]),
        pd.Series([101, 140]),
        pl.Series([101, 140]),
        pa.array([101, 140]),
        pd.Series(["101", "140"], dtype="category"),
    ]
    for form in forms:
        assert recommender.recommend(form, k=3, output="lists") == wanted
    assert recommender.recommend(users=[101, 140], k=3) == wanted
    assert recommender.recommend(101, k=3) == recommender.recommend("101", k=3) == wanted[0]
    assert recommender.recommend([101, 140], k=3, output="dict") == {101: wanted[0], 140: wanted[1]}
    assert isinstance(recommender.recommend(pd.Series([101]), k=3), pd.DataFrame)
    assert isinstance(recommender.recommend(pl.Series([101]), k=3), pl.DataFrame)
    assert recommender.recommend([], k=3) == []


def test_without_users_all_of_them_are_in_a_table(recommender: Recommender) -> None:
    found = recommender.recommend(k=2)
    assert isinstance(found, pd.DataFrame)
    assert found["user_id"].unique().tolist() == list(range(100, 250))
    assert recommender.recommend(k=2, output="lists") == recommender.recommend(list(range(100, 250)), k=2)


def test_unknown_users_keep_their_place_in_lists(recommender: Recommender) -> None:
    with pytest.raises(UserError, match=r"1 of 3 users are not in .*: 7; give their histories instead"):
        recommender.recommend([101, 7, 140])
    with pytest.warns(UserWarning, match="1 of 3 users are not in") as warned:
        found = recommender.recommend([101, 7, 140], k=2, unknown="warn")
    assert [warning.filename for warning in warned] == [__file__]
    first, second = recommender.recommend([101, 140], k=2)
    assert found == [first, [], second]
    assert recommender.recommend([101, 7], k=2, unknown="skip", output="dict") == {101: first}
    with pytest.raises(UserError, match=r"these are items: a single history must be in a list of its own"):
        recommender.recommend(["item-001", "item-002"])


def test_mixed_requests_are_refused(recommender: Recommender) -> None:
    with pytest.raises(UserError, match="number 1 is 101, and those before it are of another kind"):
        recommender.recommend([["item-001"], 101])
    with pytest.raises(UserError, match="history 0, event 1 is 'item-002', not an"):
        recommender.recommend([[("item-001", 5), "item-002"]])
    with pytest.raises(UserError, match="give one of them"):
        recommender.recommend([101], users=[101])
    with pytest.raises(UserError, match=r"output is 'panda'; choose from pandas, .* Did you mean 'pandas'"):
        recommender.recommend([101], output="panda")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="users of the store share one"):
        recommender.recommend([101, 102], at=[1, 2])


def test_include_and_exclude_for_everybody(recommender: Recommender) -> None:
    everything = items_of(recommender.recommend([101, 140], k=NUM_ITEMS))
    chosen = [f"item-{row:03d}" for row in range(0, NUM_ITEMS, 3)]
    forms: list[Any] = [chosen, set(chosen), np.array(chosen), pd.Series(chosen), pd.DataFrame({"item": chosen})]
    for form in forms:
        found = items_of(recommender.recommend([101, 140], k=5, include=form))
        assert found == [[item for item in ranked if item in chosen][:5] for ranked in everything]
        found = items_of(recommender.recommend([101, 140], k=5, exclude=form))
        assert found == [[item for item in ranked if item not in chosen][:5] for ranked in everything]
    both = items_of(recommender.recommend([101, 140], k=5, include=chosen, exclude=chosen[:4]))
    assert both == [[item for item in ranked if item in chosen[4:]][:5] for ranked in everything]
    assert items_of(recommender.recommend([101], k=5, exclude=["soap"]))[0] == everything[0][:5]


def test_scores_do_not_depend_on_the_candidates(recommender: Recommender) -> None:
    everything = [dict(ranked) for ranked in recommender.recommend(list(range(100, 200)), k=NUM_ITEMS)]
    found = recommender.recommend(list(range(100, 200)), k=3, include=["item-001", "item-039"])
    assert all(everything[user][item] == score for user, ranked in enumerate(found) for item, score in ranked)


def test_candidates_of_single_users(recommender: Recommender) -> None:
    users = list(range(100, 200))
    everything = dict(zip(users, items_of(recommender.recommend(users, k=NUM_ITEMS)), strict=True))
    lists = {101: ["item-003", "item-030", "item-031"], "150": ["item-001"], 163: [], 999: ["item-002"]}
    pairs = [(user, item) for user, items in lists.items() for item in items]
    table = pl.DataFrame({"user": [str(user) for user, _ in pairs], "item": [item for _, item in pairs]})
    own = {int(user): set(items) for user, items in lists.items()}
    without = items_of(recommender.recommend(users, k=6, exclude_by_user=lists))
    assert without == [[item for item in everything[u] if item not in own.get(u, ())][:6] for u in users]
    assert items_of(recommender.recommend(users, k=6, exclude_by_user=table)) == without
    only = items_of(recommender.recommend(users, k=6, include_by_user=lists))
    assert only == [[item for item in everything[u] if u not in own or item in own[u]][:6] for u in users]
    del own[163]
    only = items_of(recommender.recommend(users, k=6, include_by_user=table))
    assert only == [[item for item in everything[u] if u not in own or item in own[u]][:6] for u in users]
    all_four = items_of(
        recommender.recommend(
            users, k=9, include=sorted(everything[101])[:20], exclude=["item-003"], include_by_user=lists,
            exclude_by_user={102: ["item-004"]},
        )
    )  # fmt: skip
    allowed = set(sorted(everything[101])[:20]) - {"item-003"}
    own[163] = set()
    wanted = [
        [i for i in everything[u] if i in allowed and (u not in own or i in own[u]) and (u, i) != (102, "item-004")][:9]
        for u in users
    ]
    assert all_four == wanted


def test_filters_hold_for_histories_and_for_those_without_a_known_item(recommender: Recommender) -> None:
    histories = {"a": ["item-001"], "b": []}
    with pytest.warns(UserWarning, match="1 of 2 histories have no item that the model knows"):
        found = recommender.recommend(histories, k=3, exclude=["item-000"], exclude_by_user={"b": ["item-001"]})
    counts = recommender.store.item_counts(recommender.split.train_end)
    popular = [f"item-{row:03d}" for row in np.argsort(-counts, kind="stable") if row > 1]
    assert [item for item, _ in found["b"]] == popular[:3]
    assert "item-000" not in dict(found["a"])


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": ["soap"]}, "include has no item that the model knows"),
        ({"include": "item-001"}, "include is 'item-001'; give a list of items"),
        ({"exclude": {101: ["item-001"]}}, "give lists of users to exclude_by_user"),
        ({"exclude": pd.DataFrame({"user": [1], "item": [2]})}, "give pairs of users and items to exclude_by_user"),
        ({"exclude_by_user": ["item-001"]}, "give a mapping from users to items, or a table of pairs"),
        ({"exclude_by_user": {101: "item-001"}}, r"exclude_by_user\[101\] is 'item-001'"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_filters_that_cannot_be_read(recommender: Recommender, filters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recommender.recommend([101], **filters)


def test_unknown_items_of_a_restriction_are_reported(recommender: Recommender) -> None:
    with pytest.warns(
        UserWarning, match="1 of 2 entries of include are items that the model does not know, such as 'soap'"
    ):
        recommender.recommend([101], include=["item-001", "soap"], filter_seen=False)
    with pytest.raises(UserError, match="1 of 2 entries of include"):
        recommender.recommend([101], include=["item-001", "soap"], unknown="raise")


@pytest.mark.parametrize("k", [41, 10**12])
def test_a_huge_k_means_all_candidates_with_a_note(recommender: Recommender, k: int) -> None:
    with pytest.warns(Note, match=f"k is {k:,}, but there are 40 items; lists have no more than that"):
        (found,) = recommender.recommend([101], k=k, filter_seen=False)
    assert len(found) == NUM_ITEMS
    with pytest.warns(Note, match="there are 2 candidates"):
        (found,) = recommender.recommend([101], k=k, filter_seen=False, include=["item-001", "item-002"])
    assert len(found) == 2
    with pytest.warns(Note):
        assert len(recommender.similar_items("item-001", k=k)) == NUM_ITEMS - 1


def test_batches_give_what_recommend_gives(recommender: Recommender) -> None:
    options: dict[str, Any] = {"k": 4, "exclude": ["item-002"], "exclude_by_user": {120: ["item-003"]}}
    table = recommender.recommend(output="arrow", **options).to_pydict()
    parts = list(recommender.recommend_batches(batch_size=64, **options))
    assert len(parts) == 3
    assert [item for part in parts for item in part.item_ids] == table["item_id"]
    assert [user for part in parts for user in part.user_ids] == table["user_id"]
    assert [place + 100 for part in parts for place in part.places] == table["user_id"]
    with pytest.warns(DeprecationWarning, match="recommend_users is now recommend_batches"):
        old = list(recommender.recommend_users([101, 120], 4))
    assert [item for part in old for item in part.item_ids] == flat(items_of(recommender.recommend([101, 120], 4)))


def test_similar_items_of_many(recommender: Recommender) -> None:
    items = ["item-007", "item-001", "item-007"]
    lists = recommender.similar_items(items, k=3)
    assert lists == [recommender.similar_items(item, k=3) for item in items]
    table = recommender.similar_items(pd.DataFrame({"sku": items}), k=3)
    assert isinstance(table, pd.DataFrame)
    assert table.columns.tolist() == ["item_id", "similar_item_id", "rank", "score"]
    assert table["similar_item_id"].tolist() == flat(items_of(lists))
    assert list(recommender.similar_items(["item-007"], k=2, output="dict")) == ["item-007"]
    (found,) = items_of(recommender.similar_items(["item-007"], k=3, exclude=[lists[0][0][0]]))
    assert found[:2] == [item for item, _ in lists[0][1:]]
    with pytest.raises(UserError, match=r"does not know 2 of the items, such as 'soap', 'tea'"):
        recommender.similar_items(["item-001", "soap", "tea"])


def test_vectors_give_the_scores(recommender: Recommender) -> None:
    items = recommender.item_vectors()
    assert items.ids.tolist() == [f"item-{row:03d}" for row in range(NUM_ITEMS)]
    assert items.matrix.dtype == np.float32 and items.matrix.shape == (NUM_ITEMS, 8)
    users = recommender.user_vectors([101, 140])
    assert users.ids.tolist() == [101, 140]
    scores = users.matrix @ items.matrix.T
    for row, ranked in zip(scores, recommender.recommend([101, 140], k=5, filter_seen=False), strict=True):
        assert [score for _, score in ranked] == pytest.approx(sorted(row, reverse=True)[:5], abs=1e-6)
    some = recommender.item_vectors(["item-030", "item-002", "item-030"])
    assert np.array_equal(some.matrix, items.matrix[[30, 2, 30]])
    assert np.array_equal(recommender.item_vectors("item-002").matrix, items.matrix[[2]])
    with pytest.warns(UserWarning, match="1 of 2 users have no item that the model knows and no vector"):
        given = recommender.user_vectors({"a": [], "b": ["item-001"]})
    assert given.ids.tolist() == ["b"] and given.matrix.shape == (1, 8)
    assert recommender.user_vectors().matrix.shape == (150, 8)


def test_item_vectors_of_a_large_catalogue_are_read_in_pieces(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recommender.item_vectors().matrix
    monkeypatch.setattr("turbogr.recommend._ITEM_PIECE", 7)
    rows = np.random.default_rng(0).permutation(NUM_ITEMS)
    ids = [f"item-{row:03d}" for row in rows]
    assert np.array_equal(recommender.item_vectors(ids).matrix, wanted[rows])
    assert np.array_equal(recommender.item_vectors().matrix, wanted)


class LastItemScorer:
    """A method without vectors: the item after the last one is best."""

    num_items, num_workers, batch_size = NUM_ITEMS, 1, 64

    def score(self, histories: UserHistories, step: Any) -> Scores:
        events = histories.events(newest=1)
        rows = torch.from_numpy(events.items)
        return MatrixScores(-((torch.arange(NUM_ITEMS) - rows[:, None] - 1) % NUM_ITEMS).float())


def test_any_scorer_recommends_and_vectors_are_refused_where_there_are_none(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", draw_histories(0, 150, NUM_ITEMS), NUM_ITEMS)
    recommender = Recommender(LastItemScorer(), store, Split.of(store))
    assert items_of(recommender.recommend([["item-005", "item-008"]], k=2)) == [["item-009", "item-010"]]
    for ask in (
        lambda: recommender.similar_items("item-001"),
        lambda: recommender.item_vectors(),
        lambda: recommender.user_vectors([101]),
    ):
        with pytest.raises(UserError, match="has no vectors of users and items"):
            ask()
    with_model = Recommender(LastItemScorer(), store, Split.of(store), model=ModelScorer(TimeEncoder(), MAX_LEN))
    assert with_model.item_vectors().matrix.shape == (NUM_ITEMS, 8)
    with pytest.raises(UserError, match="was not loaded from a run"):
        _ = with_model.run
