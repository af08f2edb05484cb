"""Wrong input is refused with its line, or dropped and counted where the user allows it; nothing crashes."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.data.logs import random_events, write_csv
from turbogr.data.prepare.data_warnings import DataWarning
from turbogr.data.prepare.preparation import prepare, prepare_table
from turbogr.data.prepare.sources import delimited
from turbogr.data.store import Store
from turbogr.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

HEADER = b"user_id,item_id,timestamp\n"
GOOD = b"1,2,1650000000\n3,4,1650000001\n1,4,1650000002\n"

WRONG_RECORDS = {
    "broken UTF-8": (b"1,\xff\xfe,1650000005\n", "bytes that are not UTF-8", "broken UTF-8"),
    "too few columns": (b"1,2\n", "2 columns instead of 3", "ragged row"),
    "too many columns": (b"1,2,1650000005,9\n", "4 columns instead of 3", "ragged row"),
    "NaN": (b"1,2,nan\n", "not a number", "unreadable time"),
    "infinite": (b"1,2,inf\n", "not a number", "unreadable time"),
    "text for a time": (b"1,2,noon\n", "'noon'.*not a number", "unreadable time"),
    "no time": (b"1,2,\n", "missing", "missing time"),
    "spaces for a time": (b"1,2,  \n", "missing", "missing time"),
    "negative time": (b"1,2,-5\n", "negative", "negative time"),
    "the year 50000": (b"1,2,1515700000000\n", "after the year 2200", "time after the year 2200"),
    "time beyond 64 bits": (b"1,2,99999999999999999999999\n", "after the year 2200", "time after the year 2200"),
    "no user": (b",2,1650000005\n", "the user.*is missing", "missing user"),
    "no item": (b"1,,1650000005\n", "the item.*is missing", "missing item"),
    "item beyond 64 bits": (b"1,18446744073709551616,1650000005\n", "does not fit 64 bits", "integer beyond 64 bits"),
}


def prepare_bytes(folder: Path, data: bytes, suffix: str = "csv", **options: object) -> Store:
    path = folder / f"log.{suffix}"
    path.write_bytes(data)
    source = {"csv": "csv", "jsonl": "jsonl", "parquet": "parquet"}[suffix]
    return prepare(source, [path], folder / "store", overwrite=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", WRONG_RECORDS)
@pytest.mark.parametrize("pieces", [1 << 24, 60])
def test_a_wrong_record_is_refused_with_its_line_or_dropped_and_counted(
    tmp_path: Path, case: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "_PIECE", pieces)
    record, message, reason = WRONG_RECORDS[case]
    data = HEADER + GOOD + b"\n" + record + GOOD
    with pytest.raises(UserError, match=rf"log\.csv, line 6: .*{message}"):
        prepare_bytes(tmp_path, data)
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]
    store = prepare_bytes(tmp_path, data, drop_bad_rows=True)
    assert store.manifest.account == {"rows_in": 7, "rows_kept": 6, "dropped": {reason: 1}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "log.csv is empty"),
        (HEADER, "holds no records"),
        (HEADER + b"\n\n", "no records|no user"),
        (b"\n" + HEADER + GOOD, "line 1: the header is blank"),
        (HEADER + b'1,"2,1650000000\n3,4,5\n', "line 2: a quote is opened here and never closed"),
        (HEADER + GOOD + b'1,2,"1650000000\n' + GOOD, "line 5: a quote is opened here and never closed"),
        (HEADER + GOOD + b'1,2,"1650000000', "line 5: a quote is opened here and never closed"),
        (HEADER + GOOD + b'1,2,"1650000000\n', "line 5: a quote is opened here and never closed"),
        (HEADER + b'1,"2,3\n' + GOOD + b'1,"4,5\n' + GOOD, "line 2: .* goes on after its closing quote"),
        (HEADER + GOOD + b'1,"a"b,5\n' + GOOD, "line 5: .* goes on after its closing quote"),
        (b"user_id,item_id,item_id,timestamp\n1,2,2,3\n", "line 1: 2 columns are called 'item_id'"),
        (b"user_id,item_id,timestamp,x,x\n1,2,3,4,5\n", "line 1: 2 columns are called 'x'"),
        (b"user_id,item_id,video_id,timestamp\n1,2,2,3\n", "'item_id' and 'video_id' both look like the item"),
        (b"user_id,itm_id,timestamp\n1,2,3\n", "no column looks like the item.*Did you mean --item-column itm_id"),
        (b"user_id,item_id\n1,2\n", "no column looks like the time.*--time-column none"),
        (HEADER.replace(b"\n", b"\r") + b"1,2,3\r", "carriage return"),
        ("user_id,item_id,timestamp\n1,2,3\n".encode("utf-16-le"), "header has zero bytes.*utf-16"),
        (b"\xff" + HEADER + GOOD, "header is not UTF-8"),
        (b"x" * 140_000 + b"," + HEADER + GOOD, "line 1: the header names a column with more than 65,536 characters"),
        (b'"x,' + HEADER + GOOD, "line 1: a quote is opened here and never closed"),
        (b'"no\nte",' + HEADER + b"a,1,2,3\n4,5\n", "line 4: 2 columns instead of 4"),
        (HEADER + b"1,2,5\n1,3,6\n", "a single user"),
        (HEADER + b"1,2,5\n2,2,6\n", "a single item"),
        (HEADER + b"1,2,1650000000000\n3,4,1650000000001\n5,6,1650000000\n", "line 4: .*does not fit the unit 'ms'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_bytes(tmp_path, data)
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]


def test_a_quoted_line_end_in_the_header(tmp_path: Path) -> None:
    data = b'"no\nte",' + HEADER + b"a,1,2,1650000000\nb,3,4,1650000000\n"
    assert prepare_bytes(tmp_path, data).num_events == 2


def test_delimiters_in_quotes_do_not_count(tmp_path: Path) -> None:
    data = b'"a;b;c;d;e",' + HEADER + b"a,1,2,1650000000\nb,3,4,1650000000\n"
    assert prepare_bytes(tmp_path, data).num_events == 2


@pytest.mark.parametrize("delimiter", ["é", "\n", "\r", '"', "", ",,"])
@pytest.mark.parametrize("names", [(), ("user", "item", "time")])
def test_what_cannot_be_a_delimiter(tmp_path: Path, delimiter: str, names: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--delimiter must be one ASCII character"):
        prepare_bytes(tmp_path, HEADER + GOOD, delimiter=delimiter, column_names=names)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_names_of_files_need_not_be_unicode(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xfe." + suffix.encode())
    path.write_bytes(HEADER + GOOD if suffix == "csv" else parquet_bytes())
    assert prepare(suffix, [path], tmp_path / os.fsdecode(b"store\xff")).num_users == 2


def test_options_of_the_wrong_type(tmp_path: Path) -> None:
    for options, message in (
        ({"time_unit": "weeks"}, "--time-unit must be one of auto, s"),
        ({"time_unit": 60}, "--time-unit must be one of auto, s"),
        ({"min_user_events": "3"}, "--min-user-events must be an integer"),
        ({"min_item_events": 2.5}, "--min-item-events must be an integer"),
        ({"threads": "2"}, "--threads must be an integer"),
        ({"threads": 0}, "--threads must be an integer of at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            prepare_bytes(tmp_path, HEADER + GOOD, **options)  # type: ignore[arg-type]


def test_a_log_without_columns(tmp_path: Path) -> None:
    for table in (pa.table({}), pd.DataFrame(), pl.DataFrame()):
        with pytest.raises(UserError, match="the table has no columns"):
            prepare_table(table, tmp_path / "store")
    with pytest.raises(UserError, match=r"log\.jsonl has no columns"):
        prepare_bytes(tmp_path, b"{}\n{}\n", "jsonl")


def test_filters_that_leave_nothing(tmp_path: Path) -> None:
    prepare_bytes(tmp_path, HEADER + GOOD)
    for extend in (None, tmp_path / "store"):
        with pytest.raises(
            UserError, match="no records are left to prepare: 3 records in, dropped user with fewer than 9"
        ):
            prepare("csv", [tmp_path / "log.csv"], tmp_path / "other", extend=extend, min_user_events=9)


def test_ids_with_line_ends_are_a_warning(tmp_path: Path) -> None:
    with pytest.warns(DataWarning, match=r"1 item id contains a line end, such as 'a\\nb'"):
        prepare_bytes(tmp_path, HEADER + GOOD + b'1,"a\nb",1650000005\n')


def test_the_line_is_right_after_quoted_line_ends(tmp_path: Path) -> None:
    header = b"note,user_id,item_id,timestamp\n"
    data = header + b'"a\nb",1,2,5\n"""\n\n",3,4,6\n\nx,1,2,oops\n'
    with pytest.raises(UserError, match=r"line 8: .*'oops'"):
        prepare_bytes(tmp_path, data)


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("pieces", [*range(90, 130, 3), 1 << 24])
def test_quoted_line_ends_are_no_ends_of_pieces(
    tmp_path: Path, pieces: int, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "_PIECE", pieces)
    rows = [b'1,"a\nb",10,5" wide,1651363200,"c\nd"', b'2,x,11,"5"" wide",1651363201,"\n,e"']
    data = b"user_id,note,item_id,title,timestamp,url\n" + b"\n".join(rows * 6) + end
    assert prepare_bytes(tmp_path, data).num_events == 12


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"user_id": 1, "item_id": 2', "not JSON"),
        ('{"user_id": "x", "item_id": 2, "timestamp": 5}', "field 'user_id' is \"x\".*a number"),
        ('{"user_id": 1, "item_id": [2], "timestamp": 5}', "field 'item_id'"),
        ('{"user_id": 1, "item_id": 99999999999999999999, "timestamp": 5}', "does not fit 64 bits"),
        ('{"user_id": 1, "item_id": 2}', "time.*missing"),
        ('{"user_id": null, "item_id": 2, "timestamp": 5}', "user.*missing"),
        ('{"user_id": 1, "item_id": 2, "timestamp": NaN}', "time"),
        ("[1, 2, 3]", "not a JSON object"),
        ('{"user_id": 1, "item_id": "\\ud800", "timestamp": 5}', "half of a surrogate pair"),
        ('{"user_id": 1, "item_id": 2, "timestamp": 5, "note": "\\uDFFF"}', "half of a surrogate pair"),
        ('{"user_id": 1, "item_id": 2, "timestamp": 5, "item_id": 3}', "field 'item_id' occurs twice"),
        ('{"user_id": 1, "item_id": 2, "timestamp": 5} {"user_id": 1, "item_id": 2, "timestamp": 6}', "not JSON"),
        ("\udcff", "UTF-8"),
        ('{"user_id": 1, "item_id": 2, "timestamp": "\udcff"}', "UTF-8"),
    ],
)
def test_wrong_json_is_refused_with_its_line_or_dropped(tmp_path: Path, line: str, message: str) -> None:
    good = [json.dumps({"user_id": u, "item_id": i, "timestamp": t}) for u, i, t in random_events(1200, 5, 9, seed=0)]
    lines = [*good, line, *good]
    data = "\n".join(lines).encode("utf-8", "surrogateescape")
    with pytest.raises(UserError, match=rf"log\.jsonl, line 1201: .*{message}"):
        prepare_bytes(tmp_path, data, "jsonl")
    store = prepare_bytes(tmp_path, data, "jsonl", drop_bad_rows=True)
    assert store.manifest.account["rows_in"] == 2401
    assert store.manifest.account["rows_kept"] == 2400


def json_line(user: object, item: object, time: object) -> str:
    return json.dumps({"user_id": user, "item_id": item, "timestamp": time})


@pytest.mark.parametrize(
    ("wrong", "message", "reason"),
    [
        ("garbage", "not JSON", "not JSON"),
        (json_line(1, "x", 5), "'item_id'", "value of another type"),
        (json_line(1, 6.5, 5), "'item_id' is 6.5, but ids must be integers", "value of another type"),
        (json_line(1, [2], 5), "'item_id'", "value of another type"),
        (json_line(1, True, 5), "'item_id'", "value of another type"),
        (json_line(1, 2, "noon"), "'timestamp'", "value of another type"),
    ],
)
@pytest.mark.parametrize("place", [0, 5, 1200])
def test_wrong_json_anywhere_is_dropped_and_counted(
    tmp_path: Path, wrong: str, message: str, reason: str, place: int
) -> None:
    lines = [json_line(*event) for event in random_events(1300, 5, 9, seed=0)]
    lines.insert(place, wrong)
    data = "\n".join(lines).encode()
    with pytest.raises(UserError, match=message) as refused:
        prepare_bytes(tmp_path, data, "jsonl")
    if place or wrong == "garbage":  # a first line of another type passes for the right one
        assert f"line {place + 1}:" in str(refused.value) or "lists or objects" in str(refused.value)
    account = prepare_bytes(tmp_path, data, "jsonl", drop_bad_rows=True).manifest.account
    assert account["rows_in"] == 1301
    assert account["dropped"] == {reason: 1}


def test_wrong_json_is_counted_by_reason(tmp_path: Path) -> None:
    good = [json_line(*event) for event in random_events(50, 5, 9, seed=0)]
    wrong = ["{", "[1]", '"x"', json_line(1, 2**64, 5), json_line(1, "x", 5), json_line(None, 2, 5), "\udcff"]
    data = "\n".join([*good, *wrong, good[0].replace("item_id", "user_id")]).encode("utf-8", "surrogateescape")
    assert prepare_bytes(tmp_path, data, "jsonl", drop_bad_rows=True).manifest.account["dropped"] == {
        "broken UTF-8": 1,
        "integer beyond 64 bits": 1,
        "missing user": 1,
        "not JSON": 1,
        "not a JSON object": 2,
        "repeated field": 1,
        "value of another type": 1,
    }


def test_text_ids_with_half_a_surrogate_pair(tmp_path: Path) -> None:
    lines = [json.dumps({"user_id": k % 2, "item_id": f"{k % 3} }} {{", "timestamp": k}) for k in range(6)]
    data = "\n".join([*lines, lines[0].replace("0 } {", "\\ud800"), ""]).encode()
    with pytest.raises(UserError, match="line 7: a text holds half of a surrogate pair"):
        prepare_bytes(tmp_path, data, "jsonl")
    assert prepare_bytes(tmp_path, data, "jsonl", drop_bad_rows=True).num_events == 6


def test_an_object_over_two_lines_and_two_on_the_next_are_no_records(tmp_path: Path) -> None:
    lines = [json.dumps({"user_id": k % 2, "item_id": k, "timestamp": k}) for k in range(3)]
    data = "\n".join([lines[0], lines[1].replace(", ", ",\n", 1) + lines[2], *lines]).encode()
    with pytest.raises(UserError, match="line 2: not JSON"):
        prepare_bytes(tmp_path, data, "jsonl")


def parquet_bytes(**columns: object) -> bytes:
    sink = pa.BufferOutputStream()
    table = {"user_id": [1, 2, 1, 2], "item_id": [5, 6, 7, 8], "timestamp": [1, 2, 3, 4], **columns}
    pq.write_table(pa.table(table), sink)
    return bytes(sink.getvalue())


def unchecked_text(values: list[bytes]) -> pa.Array:
    """Text as other programs write it: called UTF-8 without being so."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values).buffers())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"timestamp": [1.0, float("nan"), 3.0, 4.0]}, "row 2: .*not a number"),
        ({"timestamp": [1, None, 3, 4]}, "row 2: .*missing"),
        ({"timestamp": [1, -2, 3, 4]}, "row 2: .*negative"),
        ({"timestamp": [True, False, True, False]}, "type bool"),
        ({"item_id": [5, None, 7, 8]}, "row 2: .*the item.*missing"),
        ({"item_id": [5.0, 6.0, 7.0, 8.0]}, r"ids must be integers or text .*astype\('Int64'\)"),
        ({"item_id": pa.array([5, 2**64 - 1, 7, 8], pa.uint64())}, "row 2: .*does not fit 64 bits"),
        ({"item_id": pa.array([b"a", b"\xff", b"c", b"d"])}, "row 2: .*not UTF-8"),
        ({"item_id": unchecked_text([b"a", b"\xff", b"c", b"d"])}, "row 2: .*not UTF-8"),
        ({"timestamp": unchecked_text([b"1", b"2", b"\xff", b"4"])}, "row 3: .*not UTF-8"),
        ({"item_id": [[1], [2], [3], [4]]}, "ids must be integers or text"),
    ],
)
def test_wrong_parquet_values(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_bytes(tmp_path, parquet_bytes(**columns), "parquet")


def test_wrong_parquet_files(tmp_path: Path) -> None:
    whole = parquet_bytes()
    for data, message in (
        (b"", "is empty"),
        (whole[:-20], "not a whole Parquet file"),
        (HEADER + GOOD, "not a whole Parquet file"),
    ):
        with pytest.raises(UserError, match=message):
            prepare_bytes(tmp_path, data, "parquet")
    empty = pa.table({"user_id": pa.array([], pa.int64()), "item_id": pa.array([], pa.int64()), "timestamp": [] * 0})
    pq.write_table(empty, tmp_path / "log.parquet")
    with pytest.raises(UserError, match="holds no records"):
        prepare("parquet", [tmp_path / "log.parquet"], tmp_path / "store")


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bytes_of_parquet_crash(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    whole = np.frombuffer(parquet_bytes(item_id=["a", "b", "c", "d"]), np.uint8)
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        damaged = whole.copy()
        damaged[random.integers(0, len(whole), 3)] = random.integers(0, 256, 3)
        outcomes[outcome(tmp_path, damaged.tobytes(), "parquet")] += 1
    assert outcomes["refused"] > 20


def test_parts_of_different_schemas(tmp_path: Path) -> None:
    (tmp_path / "0.parquet").write_bytes(parquet_bytes())
    (tmp_path / "1.parquet").write_bytes(parquet_bytes(item_id=["a", "b", "c", "d"]))
    with pytest.raises(UserError, match=r"'item_id' is an integer in .*0\.parquet but text in .*1\.parquet"):
        prepare("parquet", [tmp_path], tmp_path / "store")
    pq.write_table(pa.table({"user_id": [1], "timestamp": [2]}), tmp_path / "1.parquet")
    with pytest.raises(UserError, match=r"1\.parquet: there is no column 'item_id'"):
        prepare("parquet", [tmp_path], tmp_path / "store")
    write_csv(tmp_path / "a.csv", [(1, 2, 3)])
    write_csv(tmp_path / "b.csv", [(1, 2, 3)], "user_id,article,timestamp")
    with pytest.raises(UserError, match=r"b\.csv: there is no column 'item_id'"):
        prepare("csv", [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "store")


def test_text_in_a_kept_number_column(tmp_path: Path) -> None:
    data = b"user_id,item_id,timestamp,rating\n1,2,3,4\n2,3,4,good\n"
    with pytest.raises(UserError, match="line 3: 'good' in column 'rating' is not a number"):
        prepare_bytes(tmp_path, data, keep_columns=["rating"])


@pytest.mark.parametrize("name", ["a/b", "../../b", "b\0", "b" * 300])
def test_a_kept_column_that_cannot_name_a_file(tmp_path: Path, name: str) -> None:
    table = pa.table({"user_id": [1, 2], "item_id": [1, 2], "timestamp": [1, 2], name: [3, 4]})
    with pytest.raises(UserError, match=r"--keep-columns: .* cannot be the name of a file"):
        prepare_table(table, tmp_path / "store", keep_columns=[name])
    assert not list(tmp_path.iterdir())


def test_exact_duplicates_need_times(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--duplicates exact compares times"):
        prepare_bytes(tmp_path, HEADER + GOOD + GOOD, time_column="none", duplicates="exact")
    assert prepare_bytes(tmp_path, HEADER + GOOD + GOOD, time_column="none", duplicates="item").num_events == 3


def outcome(folder: Path, data: bytes, suffix: str, **options: object) -> str:
    """Prepare; anything but a store with a right account or a UserError is a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = prepare_bytes(folder, data, suffix, **options)
    except UserError:
        return "refused"
    finally:
        assert {file.name for file in folder.iterdir()} <= {f"log.{suffix}", "store"}
    account = store.manifest.account
    assert account["rows_in"] == account["rows_kept"] + sum(account["dropped"].values())
    assert account["rows_kept"] == store.num_events
    return "prepared"


PLAIN_FIELDS = (
    "1|2|17|a|B||-1|0x1|1e5|1.5|nan|null| 7 |\0|€|1650000000|1650000000000|2022-05-01|2022-05-01T10:00:00Z|" + "9" * 25
)
QUOTED_FIELDS = [b'"', b'"q"', b'""', b'"a,b"', b"\xff", b"\r"]
FIELDS = st.sampled_from([*PLAIN_FIELDS.encode().split(b"|"), *QUOTED_FIELDS])
HOSTILE = st.lists(st.lists(FIELDS, min_size=1, max_size=4).map(b",".join), max_size=12).map(b"\n".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=HOSTILE, drop=st.booleans(), pieces=st.sampled_from([16, 64, 1 << 20]))
@example(body=b'1,2,3\n1,"', drop=True, pieces=16)
def test_no_text_crashes(tmp_path_factory: pytest.TempPathFactory, body: bytes, drop: bool, pieces: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "_PIECE", pieces)
        outcome(tmp_path_factory.mktemp("fuzz"), HEADER + body, "csv", drop_bad_rows=drop)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=HOSTILE)
def test_lines_are_kept_or_counted(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    """Without quotes a row is a line: none may vanish."""
    body = re.sub(rb'["\r]', b"", body)
    folder = tmp_path_factory.mktemp("lines")
    if outcome(folder, HEADER + GOOD + body + b"\n", "csv", drop_bad_rows=True) == "prepared":
        lines = sum(bool(line) for line in (GOOD + body).split(b"\n"))
        assert Store.open(folder / "store").manifest.account["rows_in"] == lines


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), drop=st.booleans())
def test_no_damaged_file_crashes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, drop: bool) -> None:
    suffix = data.draw(st.sampled_from(["csv", "jsonl", "parquet"]))
    jsonl = b"".join(b'{"user_id": %d, "item_id": "%d", "timestamp": %d}\n' % (k % 3, k, k) for k in range(9))
    whole = {"csv": HEADER + GOOD, "jsonl": jsonl, "parquet": parquet_bytes()}[suffix]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(len(damaged) // 2, len(damaged)))]
    outcome(tmp_path_factory.mktemp("damage"), bytes(damaged), suffix, drop_bad_rows=drop)
