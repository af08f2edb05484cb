"""The form of times and the kind of ids depend on the records that are kept, whatever their order and types."""

from __future__ import annotations

import json
import re
import warnings
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turbogr.data.prepare.data_warnings import DataWarning
from turbogr.data.prepare.preparation import prepare, prepare_table
from turbogr.data.prepare.sources import delimited
from turbogr.data.store import Store
from turbogr.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:leave-two-out")

T = 1_651_408_215
HEADER = "user_id,item_id,timestamp\n"
GOOD = "".join(f"{k % 3},{k % 5},{T + k}\n" for k in range(20))


def prepare_text(folder: Path, *texts: str, source: str = "csv", **options: object) -> Store:
    """Prepare a log of several files, in this order."""
    paths = [folder / f"{place}.{source}" for place in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return prepare(source, paths, folder / "store", overwrite=True, **options)  # type: ignore[arg-type]


def table(**columns: object) -> pa.Table:
    whole = {"user_id": [1, 2, 1, 2], "item_id": [5, 6, 7, 8], "timestamp": [T, T + 1, T + 2, T + 3]}
    return pa.table({**whole, **columns})


def dropped(store: Store) -> dict[str, int]:
    return dict(store.manifest.account["dropped"])


def test_parts_without_a_time_do_not_settle_the_form_of_parquet(tmp_path: Path) -> None:
    times = {"0": pa.nulls(4, pa.int64()), "1": pa.nulls(4), "2": pa.array([(T + k) * 1000 for k in range(4)])}
    for name, column in times.items():
        pq.write_table(table(timestamp=column), tmp_path / f"{name}.parquet")
    store = prepare("parquet", [tmp_path], tmp_path / "store", drop_bad_rows=True)
    assert dropped(store) == {"missing time": 8}
    assert store.times.min() == T


@pytest.mark.parametrize("first", ["1,2,\n", "1,2,n/a\n", "1,2,nan\n", "1,2,noon\n1,2,\n"])
@pytest.mark.parametrize("time", ["2022-05-01T12:30:15", f"{T}", f"{T}000", f"{T}.5"])
def test_parts_without_a_time_do_not_settle_the_form_of_text(tmp_path: Path, first: str, time: str) -> None:
    good = HEADER + "".join(f"{k % 3},{k % 5},{time}\n" for k in range(20))
    store = prepare_text(tmp_path, HEADER + first, good, drop_bad_rows=True)
    assert store.num_events == 20
    assert set(store.times.tolist()) == {T}


def test_parts_without_a_time_do_not_settle_the_form_of_json(tmp_path: Path) -> None:
    lines = [json.dumps({"user_id": k % 3, "item_id": k % 5, "timestamp": T + k, "like": 1}) for k in range(20)]
    without = json.dumps({"user_id": 1, "item_id": 2, "timestamp": None, "like": None})
    store = prepare_text(tmp_path, without, "\n".join(lines), source="jsonl", drop_bad_rows=True, keep_columns="like")
    assert dropped(store) == {"missing time": 1}
    assert store.num_events == 20


def test_no_time_anywhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records are left to prepare: 2 records in, dropped unreadable time: 2"):
        prepare_text(tmp_path, HEADER + "1,2,noon\n", HEADER + "2,3,noon\n", drop_bad_rows=True)


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32()])
def test_times_of_a_type_that_is_too_coarse_are_refused(tmp_path: Path, kind: pa.DataType) -> None:
    largest = 30_000 if kind == pa.float16() else T
    column = pa.array(np.array([largest, largest + 1, largest + 2, largest + 5], kind.to_pandas_dtype()))
    with pytest.raises(UserError, match=r"row 1 of the table: the time column 'timestamp' .*write it as float64"):
        prepare_table(table(timestamp=column), tmp_path / "store")
    small = pa.array(np.array([0, 1, 2, 5], kind.to_pandas_dtype()))
    store = prepare_table(table(timestamp=small), tmp_path / "store", time_unit="s")
    assert sorted(store.times.tolist()) == [0, 1, 2, 5]


def test_ids_and_times_of_a_warehouse(tmp_path: Path) -> None:
    number = pa.decimal128(38, 0)
    ids = pa.array([Decimal(2**63 - 1), Decimal(-(2**63)), Decimal(7), Decimal(8)], number)
    times = pa.array([Decimal(T) + Decimal(k) / 1000 for k in (3, 2, 1, 0)], pa.decimal128(20, 3))
    log = table(user_id=pa.array([1, 1, 1, 2]).cast(number), item_id=ids, timestamp=times)
    pq.write_table(log, tmp_path / "0.parquet")
    store = prepare("parquet", [tmp_path / "0.parquet"], tmp_path / "a")
    assert store.item_ids.decode(store.items).tolist() == [7, -(2**63), 2**63 - 1, 8]
    pq.write_table(table(), tmp_path / "1.parquet")
    log = log.set_column(2, "timestamp", pa.array([T] * 4).cast(number))
    pq.write_table(log, tmp_path / "0.parquet")
    assert prepare("parquet", sorted(tmp_path.glob("*.parquet")), tmp_path / "b").num_events == 8
    wide = log.set_column(1, "item_id", pa.array([Decimal(2**63), Decimal(6), None, Decimal(8)], number))
    with pytest.raises(UserError, match=r"row 1 of the table: the item 9223372036854775808 .*does not fit 64 bits"):
        prepare_table(wide, tmp_path / "c")
    store = prepare_table(wide, tmp_path / "c", drop_bad_rows=True)
    assert dropped(store) == {"integer beyond 64 bits": 1, "missing item": 1}
    store = prepare_table(wide, tmp_path / "d", drop_bad_rows=True, text_ids=True)
    assert store.item_ids.decode([0, 1, 2]).tolist() == ["6", "8", str(2**63)]


@pytest.mark.parametrize("lazy", [False, True])
def test_columns_that_nobody_needs_are_not_converted(tmp_path: Path, lazy: bool) -> None:
    raw = {"user_id": [1, 2, 1], "item_id": [5, 6, 7], "timestamp": [T, T, T]}
    frame = pd.DataFrame(raw).assign(z=[1j, 2j, 3j], mixed=[1, "a", None])
    assert prepare_table(frame, tmp_path / "pandas").num_events == 3
    polars = pl.DataFrame({**raw, "z": pl.Series([object()] * 3, dtype=pl.Object)})
    assert prepare_table(polars.lazy() if lazy else polars, tmp_path / "polars").num_events == 3


def test_columns_whose_names_are_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame([[1, 5, T, 3.5], [2, 6, T, 4.5]])
    store = prepare_table(frame, tmp_path / "s", user_column=0, item_column=1, time_column=2, keep_columns=[3])
    assert store.actions["3"].tolist() == [3.5, 4.5]


@pytest.mark.parametrize("pieces", [1 << 24, 40])
def test_dropped_records_do_not_decide_the_kind_of_ids(
    tmp_path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "_PIECE", pieces)
    store = prepare_text(tmp_path, HEADER + GOOD + HEADER + GOOD, drop_bad_rows=True)
    assert dropped(store) == {"unreadable time": 1}
    assert (store.user_ids.kind, store.item_ids.kind) == ("integer", "integer")
    header = HEADER.replace("timestamp", "timestamp,rating")
    good = GOOD.replace("\n", ",5\n")
    store = prepare_text(tmp_path, f"{header}{good}x,y,{T},1\n1,{2**70},{T},1\n{good}", where="rating > 2")
    assert dropped(store) == {"not rating > 2": 2}
    assert (store.user_ids.kind, store.item_ids.kind) == ("integer", "integer")


@pytest.mark.parametrize(
    "text",
    [
        f"{HEADER}{GOOD}1,2,{'x' * 3_000_000}\n",
        f"{HEADER}{GOOD}1,{'9' * 3_000_000},{T}\n",
        "\0" * 1000 + "\n1\n",
        f"{'x' * 60_000},{'y' * 60_000}\n1,2\n",
        f"{'x' * 9000},{HEADER.strip()},{'x' * 9000}\n1,2,3,4,5\n",
        f"{HEADER.strip()},rating\n1,2,{T},{'z' * 9000}\n",
    ],
)
def test_messages_are_short(tmp_path: Path, text: str) -> None:
    keep = "rating" if "rating" in text else ()
    with pytest.raises(UserError) as refused:
        prepare_text(tmp_path, text, keep_columns=keep)
    assert len(str(refused.value)) < 800 + len(str(tmp_path))


def test_bytes_in_messages_are_short(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_bytes((HEADER + GOOD).encode() + b"1," + b"\xff" * 9000 + b",3\n")
    with pytest.raises(UserError, match=r"not UTF-8: b'\\xff.*of 9,000 bytes"):
        prepare("csv", tmp_path / "0.csv", tmp_path / "store")


def test_json_with_text_ids(tmp_path: Path) -> None:
    ids = ["a", 1, 2**63, -5, "1"]
    lines = "\n".join(json.dumps({"user_id": k % 2, "item_id": ids[k], "timestamp": T + k}) for k in range(5))
    store = prepare_text(tmp_path, lines, source="jsonl", text_ids=True)
    assert store.user_ids.decode([0, 1]).tolist() == ["0", "1"]
    assert store.item_ids.decode([0, 1, 2, 3]).tolist() == ["-5", "1", str(2**63), "a"]
    with pytest.raises(
        UserError, match="line 2: field 'item_id' is a number here and text in earlier lines; --text-ids"
    ):
        prepare_text(tmp_path, lines, source="jsonl")
    with pytest.raises(UserError, match="'item_id' is a boolean here and a number in earlier lines"):
        prepare_text(tmp_path, lines.replace('"a"', "3").replace(str(2**63), "true"), source="jsonl")
    with pytest.raises(UserError, match=r"line 3: .*does not fit 64 bits; --text-ids"):
        prepare_text(tmp_path, lines.replace('"a"', "3").replace('"1"', "4"), source="jsonl")


def early(folder: Path, times: list[object], **options: object) -> list[str]:
    rows = "".join(f"{k % 2},{k % 3},{time}\n" for k, time in enumerate(times))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_text(folder, HEADER + rows, **options)
    return [str(w.message) for w in caught if w.category is DataWarning and " times lie " in str(w.message)]


@pytest.mark.parametrize(
    ("times", "dates"),
    [
        ([202205011230, 202205011231, 202205011232, 202205011233], "first 1976-05-29.*, last 1976-05-29"),
        ([2022, 2023, 2024, 2024], "first 1970-01-01T00:33:42Z, last 1970-01-01T00:33:44Z"),
        ([20220501, 20221301, 20221302, 20220501], "first 1970-08-23.*, last 1970-08-23"),
    ],
)
def test_early_times_are_a_warning(tmp_path: Path, times: list[object], dates: str) -> None:
    (sentence,) = early(tmp_path, times)
    assert re.match(rf"most times lie before 1990 \({dates}", sentence)
    assert early(tmp_path, times, time_unit="s" if times[0] < 10**11 else "ms") == []  # type: ignore[operator]


def test_usual_times_are_no_warning(tmp_path: Path) -> None:
    assert early(tmp_path, [T, T + 1, T + 2, T + 3]) == []


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (
            [T, T + 1, T + 2, 0],
            ["1 of 4 times lie before 1990", "'0' (1970-01-01)", "line 5", "timestamp >= 631152000"],
        ),
        ([T * 1000, T * 1000 + 1, 5 * 10**12, T * 1000], ["1 of 4 times lie in the future", "(2128-", "line 4"]),
        (["2022-05-01", "1970-01-01", "2022-05-02", "2022-05-02"], ["line 3", "remove these records from the log"]),
        (["2022-05-01", "2099-12-31", "2022-05-02", "2099-12-31"], ["2 of 4", "in the future", "'2099-12-31' (2099-"]),
    ],
)
def test_some_wrong_times_are_pointed_out_with_count_and_place(
    tmp_path: Path, times: list[object], words: list[str]
) -> None:
    (warning,) = early(tmp_path, times)
    assert all(word in warning for word in words), warning


def test_the_condition_that_the_warning_names_drops_them(tmp_path: Path) -> None:
    assert early(tmp_path, [T, T + 1, T + 2, 0], where="timestamp >= 631152000") == []


@pytest.mark.parametrize(("unit", "length"), [("d", 86400), ("h", 3600), ("min", 60)])
def test_times_near_1970_that_fit_a_long_unit_name_it(tmp_path: Path, unit: str, length: int) -> None:
    (warning,) = early(tmp_path, [T // length + k for k in range(4)])
    assert "one is 2022-" in warning and f"--time-unit {unit}" in warning
    assert early(tmp_path, [T // length + k for k in range(4)], time_unit=unit) == []


def test_times_from_another_start_are_no_mistake(tmp_path: Path) -> None:
    (warning,) = early(tmp_path, [1, 2, 3, 700])
    assert "another start than 1970 are fine" in warning


def test_finer_fractions_in_a_later_part_count(tmp_path: Path) -> None:
    coarse = HEADER + "2,9,2022-05-01T12:30:15\n1,8,2022-05-01T12:30:16\n"
    fine = HEADER + "".join(f"1,{k},2022-05-01T12:30:15.12345678{9 - k}Z\n" for k in range(5))
    store = prepare_text(tmp_path, coarse, fine)
    assert store.item_ids.decode(store.items).tolist() == [4, 3, 2, 1, 0, 8, 9]
    assert set(store.times.tolist()) == {T, T + 1}


def test_the_file_is_named_where_the_times_are_wrong_as_a_whole(tmp_path: Path) -> None:
    pq.write_table(table(timestamp=[True, False, True, False]), tmp_path / "log.parquet")
    with pytest.raises(UserError, match=r"log\.parquet, row 1: column 'timestamp' is of type bool"):
        prepare("parquet", tmp_path / "log.parquet", tmp_path / "store")
    with pytest.raises(UserError, match=r"0\.csv, line 2: column 'time_ms' holds times like"):
        prepare_text(tmp_path, (HEADER + GOOD).replace("timestamp", "time_ms"))


def test_a_part_without_records_and_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({name: pa.nulls(0) for name in table().column_names}), tmp_path / "0.parquet")
    pq.write_table(table(), tmp_path / "1.parquet")
    assert prepare("parquet", [tmp_path], tmp_path / "store").num_events == 4
