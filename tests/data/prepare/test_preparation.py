from __future__ import annotations

import errno
import itertools
import os
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.logs import bytes_of, expected_sequences, random_events, stored_sequences, write_csv
from turbogr.data import store_writer
from turbogr.data.prepare import id_keys, sorting, spilling, store_builder
from turbogr.data.prepare.data_warnings import DataWarning
from turbogr.data.prepare.preparation import prepare as prepare_log
from turbogr.data.prepare.preparation import prepare_table
from turbogr.data.prepare.sources import delimited, memory_table
from turbogr.data.store import Store
from turbogr.errors import Note, UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

EVENTS = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 6), st.integers(0, 20)), min_size=2, max_size=120)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut everything small, so that short logs cross every border that long ones do."""
    monkeypatch.setattr(store_builder, "_CHUNK_RECORDS", 7)
    monkeypatch.setattr(delimited, "_PIECE", 50)
    monkeypatch.setattr(memory_table, "_BATCH_ROWS", 11)
    monkeypatch.setattr(id_keys, "_MIN_MERGE", 3)
    monkeypatch.setattr(sorting.SortedLog.user_blocks, "__defaults__", (7,))
    monkeypatch.setattr(sorting.user_ranges, "__defaults__", (10,))


def frame(events: list[tuple[object, object, int]]) -> pl.DataFrame:
    users, items, times = zip(*events, strict=True)
    return pl.DataFrame({"user_id": users, "item_id": items, "timestamp": times})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    events=EVENTS,
    min_user=st.integers(1, 4),
    min_item=st.integers(1, 4),
    duplicates=st.sampled_from(["keep", "exact", "item"]),
    text=st.booleans(),
)
def test_the_store_holds_what_the_definition_says(
    small_pieces: None,
    tmp_path_factory: pytest.TempPathFactory,
    events: list[tuple[int, int, int]],
    min_user: int,
    min_item: int,
    duplicates: str,
    text: bool,
) -> None:
    out = tmp_path_factory.mktemp("property") / "store"
    log = [(f"user {u}", f"item {i}", t) for u, i, t in events] if text else events
    expected = expected_sequences(log, min_user, min_item, duplicates)
    options = {"min_user_events": min_user, "min_item_events": min_item, "duplicates": duplicates}
    if len(expected) < 2 or len({item for sequence in expected.values() for item, _ in sequence}) < 2:
        with pytest.raises(UserError, match=r"a recommender needs several|no records are left"):
            prepare_table(frame(log), out, **options)
        assert not out.exists()
        return
    store = prepare_table(frame(log), out, **options)
    assert stored_sequences(store) == expected
    users = store.user_ids.decode(np.arange(store.num_users)).tolist()
    items = store.item_ids.decode(np.arange(store.num_items)).tolist()
    assert users == sorted(users)
    assert items == sorted(items)
    assert (store.item_counts() > 0).all()
    account = store.manifest.account
    assert account["rows_in"] == len(log) == account["rows_kept"] + sum(account["dropped"].values())
    assert account["rows_kept"] == store.num_events == sum(map(len, expected.values()))


def test_pieces_and_threads_do_not_change_a_byte(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = write_csv(tmp_path / "log.csv", random_events(3000, 50, 80, seed=2))
    options = {"min_user_events": 3, "min_item_events": 3, "keep_columns": ["timestamp"]}
    whole = bytes_of(prepare_log("csv", [path], tmp_path / "whole", threads=1, **options))
    request.getfixturevalue("small_pieces")
    for threads in (1, 2, 5):
        assert bytes_of(prepare_log("csv", [path], tmp_path / f"{threads}", threads=threads, **options)) == whole


def test_the_order_of_the_records_decides_only_ties(tmp_path: Path) -> None:
    events = [(u, i, t) for t, (u, i) in enumerate((u, i) for u in range(4) for i in range(5))]
    shuffled = random.Random(0).sample(events, len(events))
    first, second = prepare_table(frame(events), tmp_path / "a"), prepare_table(frame(shuffled), tmp_path / "b")
    assert first.manifest.content_hash == second.manifest.content_hash
    tied = prepare_table(frame([(1, 9, 5), (1, 8, 5), (2, 8, 5), (1, 7, 5), (1, 6, 4)]), tmp_path / "c")
    assert stored_sequences(tied)[1] == [(6, 4), (9, 5), (8, 5), (7, 5)]


def test_ties_in_random_order(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    events = random_events(3000, 50, 80, seed=3, span=40)
    path = write_csv(tmp_path / "log.csv", events)
    by_file = prepare_log("csv", [path], tmp_path / "file", ties="file")
    by_chance = prepare_log("csv", [path], tmp_path / "random", ties="random")
    in_order, shuffled = stored_sequences(by_file), stored_sequences(by_chance)
    assert in_order == expected_sequences(events)
    assert shuffled != in_order
    for user, sequence in shuffled.items():
        assert [time for _, time in sequence] == [time for _, time in in_order[user]]
        assert sorted(sequence, key=lambda event: event[::-1]) == sorted(in_order[user], key=lambda event: event[::-1])
    tied = sum(a[1] == b[1] for sequence in in_order.values() for a, b in itertools.pairwise(sequence))
    assert by_file.manifest.ties == ("file", tied)
    assert by_chance.manifest.ties == ("random", tied)
    request.getfixturevalue("small_pieces")
    again = prepare_log("csv", [path], tmp_path / "again", ties="random", threads=3)
    assert bytes_of(again) == bytes_of(by_chance), "neither ranges of users nor threads matter"


@pytest.mark.parametrize("text", [False, True])
def test_a_random_order_stays_when_the_log_grows(tmp_path: Path, text: bool) -> None:
    """Else an extended store would hold out what its users' earlier store has trained on."""
    events = [(f"u{user}" if text else user, item, item // 4) for user in range(100, 140) for item in range(12)]
    names = {user for user, _, _ in events}
    rare = [("a" if text else 1, 0, 0), ("zz" if text else 999, 0, 0)]
    later = [(user, 50, 9) for user in names] + [("b" if text else 2, item, item // 4) for item in range(12)]
    few = {"min_user_events": 3}
    first = prepare_table(frame(events + rare), tmp_path / "first", ties="random", **few)
    grown = prepare_table(frame(events + later), tmp_path / "grown", ties="random", **few)
    extended = prepare_table(frame(events + later), tmp_path / "extended", extend=tmp_path / "first", **few)
    absent = [event for event in events if event[0] != events[0][0]]
    without = prepare_table(frame(absent + later), tmp_path / "without", extend=tmp_path / "first", **few)
    assert extended.manifest.ties[0] == "random", "as in the store that it extends"
    before = stored_sequences(first)
    for store in (grown, extended, without):
        after = stored_sequences(store)
        assert all(after[user][:12] == before[user] for user in names - ({events[0][0]} if store is without else set()))
    plain = prepare_table(frame(events + later), tmp_path / "plain", extend=tmp_path / "first", ties="file", **few)
    assert plain.manifest.ties[0] == "file"


def test_every_order_of_ties_is_as_likely(tmp_path: Path) -> None:
    events = [(user, item, 5) for user in range(3000) for item in range(3)]
    found = Counter(
        tuple(item for item, _ in sequence)
        for sequence in stored_sequences(prepare_table(frame(events), tmp_path / "store", ties="random")).values()
    )
    assert set(found) == set(itertools.permutations(range(3)))
    assert all(abs(count - 500) < 5 * 500**0.5 for count in found.values())


def test_many_ties_in_the_order_of_the_input_are_a_note(tmp_path: Path) -> None:
    events = [(user, item, 60 * (item // 2)) for user in range(9) for item in range(10)]
    with pytest.warns(Note, match=r"50% of the events have the time of the user's event before them.*--ties random"):
        prepare_table(frame(events), tmp_path / "tied")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        prepare_table(frame(events), tmp_path / "shuffled", ties="random")
        finer = [(user, item, 1_650_000_000_000 + item) for user, item, _ in events]
        prepare_table(frame(finer), tmp_path / "milliseconds")
    assert not [str(warning.message) for warning in warned if "before them" in str(warning.message)]


def test_times_are_sorted_finer_than_they_are_stored(tmp_path: Path) -> None:
    events = [(1, 30, 1_650_000_000_900), (1, 20, 1_650_000_000_100), (2, 20, 1_650_000_000_000)]
    store = prepare_table(frame(events), tmp_path / "store")
    assert stored_sequences(store)[1] == [(20, 1_650_000_000), (30, 1_650_000_000)]


def test_a_sort_that_does_not_fit_one_word_is_the_same() -> None:
    random_ = np.random.default_rng(0)
    users, times = random_.integers(0, 5, 500), random_.integers(0, 9, 500)
    packed = sorting.sort_order(users, times)
    wide = sorting.sort_order(users * 2**20, times * 2**40)
    assert np.array_equal(packed, wide)
    assert np.array_equal(packed, np.lexsort((times, users)))


def test_a_collision_of_hashes_never_merges_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, seeds = id_keys.hash_texts, []

    def weak(texts: pa.Array, seed: int) -> np.ndarray:
        seeds.append(seed)
        return honest(texts, seed) & 15 if seed < 2 else honest(texts, seed)

    monkeypatch.setattr(id_keys, "hash_texts", weak)
    monkeypatch.setattr(memory_table, "_BATCH_ROWS", 3)
    events = [(f"u{k % 7}", f"i{k % 40}", k) for k in range(100)]
    store = prepare_table(frame(events), tmp_path / "store")
    assert stored_sequences(store) == expected_sequences(events)
    assert set(seeds) == {0, 1, 2}


def test_actions_are_kept_in_the_smallest_lossless_type(tmp_path: Path) -> None:
    table_ = pl.DataFrame(
        {
            "user_id": [2, 1, 1],
            "item_id": [1, 2, 3],
            "timestamp": [3, 2, 1],
            "like": [True, False, True],
            "rating": [4.5, 3.0, None],
            "watch_ms": [100_000, 5, -7],
        }
    )
    store = prepare_table(table_, tmp_path / "store", keep_columns=["like", "rating", "watch_ms"])
    assert store.manifest.actions == ("like", "rating", "watch_ms")
    assert store.actions["like"].dtype == np.int8
    assert store.actions["like"].tolist() == [1, 0, 1]
    assert store.actions["watch_ms"].dtype == np.int32
    assert store.actions["watch_ms"].tolist() == [-7, 5, 100_000]
    assert store.actions["rating"].dtype == np.float64
    assert np.isnan(store.actions["rating"][0])


def test_conditions_on_records(tmp_path: Path) -> None:
    table_ = pl.DataFrame(
        {"user_id": [1, 1, 2, 2], "item_id": [1, 2, 1, 2], "timestamp": [1, 2, 3, 4], "rating": [4, 3, 5, None]}
    )
    with pytest.raises(UserError, match="a single item"):
        prepare_table(table_, tmp_path / "store", where=["rating >= 4"])
    store = prepare_table(table_, tmp_path / "store", where=["rating<=5", "rating != 4.5"])
    assert store.manifest.account["dropped"] == {"not rating <= 5": 1}
    for wrong in ("rating", "rating ~ 4", "rating >= four", "rating >= 1.2.3"):
        with pytest.raises(UserError, match="cannot read the condition"):
            prepare_table(table_, tmp_path / "other", where=[wrong])
    with pytest.raises(UserError, match=r"no column 'ratng'.*Did you mean 'rating'"):
        prepare_table(table_, tmp_path / "other", where=["ratng > 1"])


@pytest.mark.parametrize("kind", ["pandas", "polars", "lazy", "pyarrow", "batch"])
def test_tables_of_every_library(tmp_path: Path, kind: str) -> None:
    events = random_events(200, 10, 20, seed=3)
    polars_table = frame(events)
    tables = {
        "pandas": lambda: polars_table.to_pandas(),
        "polars": lambda: polars_table,
        "lazy": lambda: polars_table.lazy(),
        "pyarrow": lambda: polars_table.to_arrow(),
        "batch": lambda: polars_table.to_arrow().combine_chunks().to_batches()[0],
    }
    assert stored_sequences(prepare_table(tables[kind](), tmp_path / "store")) == expected_sequences(events)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a pandas, polars or pyarrow table, got list"):
        prepare_table([1, 2], tmp_path / "store")
    with pytest.raises(UserError, match="no records"):
        prepare_table(frame([(1, 1, 1)]).head(0), tmp_path / "store")


def test_look_alike_ids_stay_apart_with_a_warning(tmp_path: Path) -> None:
    events = [("Ann", "x", 1), ("ann", "X ", 2), ("ann ", "y", 3)]
    with pytest.warns(DataWarning, match=r"2 user ids differ .* only in case or in spaces"):
        store = prepare_table(frame(events), tmp_path / "store")
    assert store.num_users == 3


def test_a_leaking_split_is_a_warning(tmp_path: Path) -> None:
    events = [(u, i, 1000 * u + i) for u in range(9) for i in range(9)]
    with pytest.warns(DataWarning, match=r"trains on the future.*--split time:"):
        prepare_table(frame(events), tmp_path / "asked", split="leave-one-out")
    with pytest.warns(Note, match=r"trains on the future.*--split time:"):
        prepare_table(frame(events), tmp_path / "usual")


def test_options_are_checked(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", random_events(50, 5, 5, seed=0))
    for options, message in (
        ({"min_user_events": 0}, "at least 1"),
        ({"duplicates": "all"}, "--duplicates must be one of"),
        ({"ties": "chance"}, "--ties must be one of file, random"),
        ({"split": "leave-three-out"}, "unknown split"),
        ({"preset": "demo"}, "--preset is not an option of the source 'csv'"),
        ({"threads": 0}, "--threads must be an integer of at least 1"),
        ({"keep_columns": ["raiting"]}, "no column 'raiting'"),
        ({"time_column": "none", "split": "time:5"}, "needs times"),
        ({"time_column": "none", "ties": "random"}, "--ties random is about events at the same time"),
    ):
        with pytest.raises(UserError, match=message):
            prepare_log("csv", [path], tmp_path / "store", **options)  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("when", range(1, 12))
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """The disk is full at the n-th write, of a temporary column or of the store."""
    path = write_csv(tmp_path / "log.csv", random_events(50, 5, 5, seed=0))
    writes = 0

    def fail_sometimes(real: Any) -> Any:
        def write(*args: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == when:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return write

    monkeypatch.setattr(spilling.Spill, "append", fail_sometimes(spilling.Spill.append))
    monkeypatch.setattr(store_writer.ColumnFile, "append", fail_sometimes(store_writer.ColumnFile.append))
    monkeypatch.setattr(store_writer.ColumnFile, "close", fail_sometimes(store_writer.ColumnFile.close))
    with pytest.raises(UserError, match="is full; nothing was written"):
        prepare_log("csv", path, tmp_path / "store")
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]


def test_nothing_left_after_filtering_is_an_error_with_the_account(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no records are left.*50 records in.*user with fewer than 99 events: 50"):
        prepare_table(frame(random_events(50, 5, 5, seed=0)), tmp_path / "store", min_user_events=99)


def extended(tmp_path: Path, first: list, second: list) -> tuple[Store, Store]:
    old = prepare_table(frame(first), tmp_path / "old")
    return old, prepare_table(frame(second), tmp_path / "new", extend=tmp_path / "old")


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(first=EVENTS, second=EVENTS, third=EVENTS, text=st.booleans())
def test_extending_keeps_every_known_row(
    small_pieces: None, tmp_path_factory: pytest.TempPathFactory, first: list, second: list, third: list, text: bool
) -> None:
    folder = tmp_path_factory.mktemp("extend")
    logs = [[(0, 0, 1), (1, 1, 1), *log] for log in (first, [(u - 2, i + 4, t) for u, i, t in second], third)]
    if text:
        logs = [[(f"u{u}", f"i{i}", t) for u, i, t in log] for log in logs]
    stores = [prepare_table(frame(logs[0]), folder / "0")]
    for place, log in enumerate(logs[1:], 1):
        stores.append(prepare_table(frame(log), folder / f"{place}", extend=folder / f"{place - 1}"))
    for old, new, log in zip(stores[:-1], stores[1:], logs[1:], strict=True):
        for before, after in ((old.user_ids, new.user_ids), (old.item_ids, new.item_ids)):
            known = before.decode(np.arange(len(before)))
            assert after.decode(np.arange(len(before))).tolist() == known.tolist()
            assert after.fingerprint(len(before)) == before.fingerprint(len(before))
            assert after.encode(after.decode(np.arange(len(after)))).tolist() == list(range(len(after)))
        assert stored_sequences(new) == expected_sequences(log)
        assert new.manifest.extends == old.manifest.content_hash
        assert (new.manifest.known_users, new.manifest.known_items) == (old.num_users, old.num_items)


def test_extending_filters_new_ids_only_out_of_the_vocabulary(tmp_path: Path) -> None:
    first = [(1, 10, 1), (1, 20, 2), (2, 10, 3)]
    prepare_table(frame(first), tmp_path / "old")
    second = [(1, 20, 1), (1, 5, 2), (1, 5, 3), (2, 7, 4), (2, 5, 5)]
    new = prepare_table(frame(second), tmp_path / "new", extend=tmp_path / "old", min_item_events=2)
    assert new.item_ids.decode([0, 1, 2]).tolist() == [10, 20, 5]
    assert len(new.item_ids) == 3
    assert new.num_users == 2
    assert stored_sequences(new) == {1: [(5, 2), (5, 3)], 2: [(5, 5)]}


def test_extending_needs_ids_of_the_same_kind(tmp_path: Path) -> None:
    numbers = [(1, 1, 1), (2, 2, 2)]
    prepare_table(frame(numbers), tmp_path / "numbers")
    with pytest.raises(UserError, match="user ids are integer in the store"):
        prepare_table(frame([("a", 1, 1), ("b", 2, 2)]), tmp_path / "x", extend=tmp_path / "numbers")
    path = write_csv(tmp_path / "log.csv", [("a", 1, 1), (2, 2, 2)])
    with pytest.raises(UserError, match="user ids are integers in the store"):
        prepare_log("csv", [path], tmp_path / "x", extend=tmp_path / "numbers")
    prepare_table(frame([("1", 1, 1), ("b", 2, 2)]), tmp_path / "texts")
    store = prepare_table(frame(numbers), tmp_path / "y", extend=tmp_path / "texts")
    assert store.user_ids.decode([0, 1, 2]).tolist() == ["1", "b", "2"]


def test_a_store_can_extend_itself_in_place(tmp_path: Path) -> None:
    prepare_table(frame([(1, 1, 1), (2, 2, 2)]), tmp_path / "store")
    prepare_table(frame([(3, 3, 1), (2, 2, 2)]), tmp_path / "store", extend=tmp_path / "store", overwrite=True)
    store = Store.open(tmp_path / "store")
    assert store.item_ids.decode([0, 1, 2]).tolist() == [1, 2, 3]
    assert store.offsets.tolist() == [0, 0, 1, 2]
