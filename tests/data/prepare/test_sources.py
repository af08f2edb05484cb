from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.logs import bytes_of, expected_sequences, random_events, stored_sequences, write_csv
from turbogr.data.prepare.preparation import prepare, prepare_table
from turbogr.data.prepare.sources import delimited
from turbogr.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

EVENTS = random_events(60, 6, 8, seed=4)
EXPECTED = expected_sequences(EVENTS)


def check(source: str, path: Path, **options: object) -> None:
    store = prepare(source, [path], path.parent / "store", overwrite=True, **options)  # type: ignore[arg-type]
    assert stored_sequences(store) == EXPECTED
    assert store.manifest.source == source


def rows(events: list = EVENTS, between: str = ",", extra: str = "") -> str:
    return "".join(f"{u}{between}{i}{between}{extra}{t}\n" for u, i, t in events)


@pytest.mark.parametrize(
    "header",
    [
        "user_id,item_id,timestamp",
        "userId,movieId,timestamp",
        "uid,video_id,ts",
        "UserID,ItemID,Time",
        "user,asin,date",
    ],
)
def test_usual_names_are_recognised(tmp_path: Path, header: str) -> None:
    check("csv", write_csv(tmp_path / "log.csv", EVENTS, header))


@pytest.mark.parametrize("between", ["\t", ";", "|"])
def test_delimiters_are_recognised(tmp_path: Path, between: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"user_id{between}item_id{between}timestamp\n" + rows(between=between))
    check("csv", path)


def test_a_named_delimiter_and_named_columns(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text("a~b~c\n" + rows(between="~"))
    check("tsv", path, delimiter="~", user_column="a", item_column="b", time_column="c")
    with pytest.raises(UserError, match="one ASCII character"):
        check("tsv", path, delimiter="~~")


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_compressed_text(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_PIECE", 100)
    plain = ("user_id,item_id,timestamp\n" + rows()).encode()
    compress = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    }
    data = compress[suffix](plain)
    path = tmp_path / f"log.csv{suffix}"
    path.write_bytes(data)
    check("csv", path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cut short"):
        check("csv", path)


def test_many_files_are_one_log_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        write_csv(folder / f"part-{part}.csv", EVENTS[20 * part : 20 * part + 20])
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.csv.crc").touch()
    check("csv", folder)
    check("csv", folder / "part-*.csv")


def test_parts_may_order_their_columns_differently(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_csv(folder / "0.csv", EVENTS[:30])
    write_csv(folder / "1.csv", [(t, u, i) for u, i, t in EVENTS[30:]], "timestamp,user_id,item_id")
    check("csv", folder)


def test_quoted_fields_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('user_id,note,item_id,timestamp\n1,"a, ""b""\nc",x,5\n"2",plain,"x,\ny",6\n3,,"z",7\n')
    store = prepare("csv", [path], tmp_path / "store")
    assert stored_sequences(store) == {1: [("x", 5)], 2: [("x,\ny", 6)], 3: [("z", 7)]}


@pytest.mark.parametrize("text", ["{}", "\ufeff{}", "{}no final newline", "{}blank lines", "{}carriage returns"])
def test_merely_odd_text_works(tmp_path: Path, text: str) -> None:
    body = "user_id,item_id,timestamp\n" + rows()
    body = text[:1].replace("{", "") + body
    if "final" in text:
        body = body.rstrip("\n")
    elif "blank" in text:
        body = body.replace("\n", "\n\n") + "\n\n"
    elif "carriage" in text:
        body = body.replace("\n", "\r\n")
    path = tmp_path / "log.csv"
    path.write_bytes(body.encode())
    check("csv", path)


def test_ids_that_stop_being_integers_are_text_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_PIECE", 64)
    events = [*((k, 7, k) for k in range(40)), ("007", 7, 50), (7, "x", 51)]
    store = prepare("csv", [write_csv(tmp_path / "log.csv", events)], tmp_path / "store")
    expected = expected_sequences([(str(u), str(i), t) for u, i, t in events])
    assert stored_sequences(store) == expected
    assert {"7", "007"} <= set(expected)


def test_text_ids_on_demand(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [(1, 2, 3), ("9" * 30, 4, 5)])
    store = prepare("csv", [path], tmp_path / "store", text_ids=True)
    assert store.user_ids.decode([0, 1]).tolist() == ["1", "9" * 30]


def test_times_that_become_decimals_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_PIECE", 64)
    events = [*((k % 3, k, k) for k in range(40)), (1, 50, "40.75"), (1, 51, "40.25")]
    store = prepare("csv", [write_csv(tmp_path / "log.csv", events)], tmp_path / "store")
    assert stored_sequences(store)[1][-2:] == [(51, 40), (50, 40)]


def write_parquet(path: Path, **columns: object) -> Path:
    users, items, times = zip(*EVENTS, strict=True)
    table = {"user_id": users, "item_id": items, "timestamp": times}
    pq.write_table(pa.table({**table, **columns}), path, row_group_size=7)
    return path


def test_parquet(tmp_path: Path) -> None:
    check("parquet", write_parquet(tmp_path / "log.parquet"))


@pytest.mark.parametrize("kind", ["int16", "uint64", "dictionary", "timestamp", "date", "decimal seconds"])
def test_parquet_types(tmp_path: Path, kind: str) -> None:
    _, items, times = (np.array(column) for column in zip(*EVENTS, strict=True))
    days = times // 86400
    columns = {
        "int16": {"item_id": items.astype(np.int16)},
        "uint64": {"item_id": items.astype(np.uint64)},
        "dictionary": {"item_id": pa.array(items).dictionary_encode()},
        "timestamp": {"timestamp": pa.array(times * 10**9, pa.timestamp("ns", tz="Europe/Berlin"))},
        "date": {"timestamp": pa.array(days.astype(np.int32), pa.date32())},
        "decimal seconds": {"timestamp": times + 0.25},
    }
    path = write_parquet(tmp_path / "log.parquet", **columns[kind])
    store = prepare("parquet", [path], tmp_path / "store")
    whole_days = [(u, i, t // 86400 * 86400) for u, i, t in EVENTS]
    assert stored_sequences(store) == (expected_sequences(whole_days) if kind == "date" else EXPECTED)


def test_a_partitioned_folder(tmp_path: Path) -> None:
    table = pl.DataFrame(EVENTS, schema=["user_id", "item_id", "timestamp"], orient="row")
    folder = tmp_path / "log"
    for user, part in table.group_by("user_id"):
        target = folder / f"user_id={user[0]}"
        target.mkdir(parents=True)
        part.drop("user_id").write_parquet(target / "part-0.parquet")
    store = prepare("parquet", [folder], tmp_path / "store")
    assert {u: sorted(s) for u, s in stored_sequences(store).items()} == {u: sorted(s) for u, s in EXPECTED.items()}


def test_partitions_may_be_text_or_missing(tmp_path: Path) -> None:
    table = pa.table({"item_id": [1, 2], "timestamp": [3, 4]})
    for user in ("12", "012", "a%20b"):
        (tmp_path / "log" / f"user_id={user}").mkdir(parents=True)
        pq.write_table(table, tmp_path / "log" / f"user_id={user}" / "part.parquet")
    store = prepare("parquet", tmp_path / "log", tmp_path / "store")
    assert store.user_ids.decode([0, 1, 2]).tolist() == ["012", "12", "a b"]
    (tmp_path / "log" / "user_id=__HIVE_DEFAULT_PARTITION__").mkdir()
    pq.write_table(table, tmp_path / "log" / "user_id=__HIVE_DEFAULT_PARTITION__" / "part.parquet")
    with pytest.raises(UserError, match=r"the user .* is missing"):
        prepare("parquet", tmp_path / "log", tmp_path / "other")


@pytest.mark.parametrize("given", ["folder", "glob", "files", "one file"])
def test_only_partitions_below_what_was_given_are_columns(tmp_path: Path, given: str) -> None:
    folder = tmp_path / "user=alice" / "log"
    for day in (1, 2):
        (folder / f"day={day}").mkdir(parents=True)
        write_parquet(folder / f"day={day}" / "part.parquet", user_id=[1, 2], item_id=[3, 4], timestamp=[day, 5])
    files = [folder / f"day={day}" / "part.parquet" for day in (1, 2)]
    paths = {"folder": [folder], "glob": [folder / "day=*" / "*.parquet"], "files": files, "one file": files[:1]}[given]
    if given == "one file":
        assert prepare("parquet", paths, tmp_path / "store").num_events == 2
        return
    store = prepare("parquet", paths, tmp_path / "store", keep_columns=["day"])
    assert store.num_events == 4
    assert sorted(store.actions["day"].tolist()) == [1, 1, 2, 2]


def test_a_file_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(rows())
    with pytest.raises(UserError, match="--column-names"):
        check("csv", path)
    check("csv", path, column_names=["user_id", "item_id", "timestamp"])


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        "".join(json.dumps({"user_id": u, "x": [1], "item_id": i, "timestamp": t}) + "\n" for u, i, t in EVENTS)
    )
    check("jsonl", path)
    path.write_bytes(b"\n" + path.read_bytes().replace(b"\n", b"\n\n"))
    check("jsonl", path)


def test_json_times_may_mix_integers_and_decimals(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"user_id": k % 2, "item_id": k, "timestamp": k if k < 1500 else k + 0.5} for k in range(1600)]
    path.write_text("\n".join(map(json.dumps, lines)))
    store = prepare("jsonl", [path], tmp_path / "store")
    assert store.num_events == 1600


def test_movielens(tmp_path: Path) -> None:
    events = [(u + 10, i, t) for u, i, t in EVENTS]
    expected = expected_sequences(events)
    for name, text in (
        ("ratings.dat", "".join(f"{u}::{i}::5::{t}\n" for u, i, t in events)),
        ("u.data", "".join(f"{u}\t{i}\t5\t{t}\n" for u, i, t in events)),
        ("ratings.csv", "userId,movieId,rating,timestamp\n" + "".join(f"{u},{i},4.5,{t}\n" for u, i, t in events)),
    ):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text(text)
        (folder / "movies.dat").write_text("1::A film (1995)::Comedy\n")
        store = prepare("movielens", [folder], tmp_path / "store", overwrite=True)
        assert stored_sequences(store) == expected
        assert store.manifest.split == "leave-one-out"
    with pytest.raises(UserError, match="holds none of ratings"):
        prepare("movielens", [tmp_path], tmp_path / "other")


def test_amazon(tmp_path: Path) -> None:
    events = [(f"A{u + 100:012d}", f"B{i:09d}", t) for u, i, t in random_events(400, 8, 10, seed=5)]
    expected = expected_sequences(events, 5, 5)
    texts = {
        "ratings.csv": "".join(f"{u},{i},5.0,{t}\n" for u, i, t in events),
        "new.csv": "user_id,parent_asin,rating,timestamp\n" + "".join(f"{u},{i},5.0,{t}\n" for u, i, t in events),
        "old.json": "".join(
            json.dumps({"reviewerID": u, "asin": i, "overall": 5, "unixReviewTime": t, "reviewTime": "x"}) + "\n"
            for u, i, t in events
        ),
        "new.jsonl": "".join(
            json.dumps({"user_id": u, "asin": "x", "parent_asin": i, "timestamp": t}) + "\n" for u, i, t in events
        ),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        store = prepare("amazon", [tmp_path / name], tmp_path / "store", overwrite=True)
        assert stored_sequences(store) == expected
        assert store.manifest.filters["min_user_events"] == 5
    (tmp_path / "swapped.csv").write_text("".join(f"{i},{u},5.0,{t}\n" for u, i, t in events))
    with pytest.raises(UserError, match="--user-column item --item-column user"):
        prepare("amazon", [tmp_path / "swapped.csv"], tmp_path / "store", overwrite=True)
    store = prepare(
        "amazon", [tmp_path / "swapped.csv"], tmp_path / "store", overwrite=True, user_column="item", item_column="user"
    )
    assert stored_sequences(store) == expected


def test_sasrec_has_positions_for_times(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("1 5\n1 6\n2 6\n1 4\n2 5\n2 5\n")
    store = prepare("sasrec", [tmp_path / "log.txt"], tmp_path / "store")
    assert stored_sequences(store) == {1: [(5, 0), (6, 1), (4, 2)], 2: [(6, 0), (5, 1), (5, 2)]}
    assert store.manifest.times == "positions"
    assert store.manifest.split == "leave-two-out"


def test_p5_has_a_user_with_all_items_per_line(tmp_path: Path) -> None:
    path = tmp_path / "Beauty.txt"
    path.write_bytes(b"\xef\xbb\xbf7 5 6 4\n\n 2\t6 5  5 \r\n3 9")
    store = prepare("p5", [path], tmp_path / "store")
    assert stored_sequences(store) == {7: [(5, 0), (6, 1), (4, 2)], 2: [(6, 0), (5, 1), (5, 2)], 3: [(9, 0)]}
    assert store.manifest.times == "positions"
    assert store.manifest.split == "leave-two-out"
    assert store.manifest.account == {"rows_in": 7, "rows_kept": 7, "dropped": {}}
    with gzip.open(tmp_path / "Toys.txt.gz", "wb") as file:
        file.write(b"a x1 x2\nb x2\na x1\n")
    store = prepare("p5", [tmp_path / "Toys.txt.gz"], tmp_path / "store", overwrite=True)
    assert stored_sequences(store) == {"a": [("x1", 0), ("x2", 1), ("x1", 2)], "b": [("x2", 0)]}


def test_p5_in_blocks_gives_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"{u} {' '.join(str(u * k % 17) for k in range(1, 3 + u % 7))}\n" for u in range(200)))
    whole = bytes_of(prepare("p5", [path], tmp_path / "store"))
    monkeypatch.setattr(delimited, "_PIECE", 100)
    assert bytes_of(prepare("p5", [path], tmp_path / "again")) == whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 3\n\n4\n5 6\n", "line 3: '4' stands alone; a line must be a user and the user's items"),
        ("1,2,3\n", "line 1: '1,2,3' stands alone"),
        ("1 2 3\r4 5 6\r", "bare carriage return"),
        ("1 2 3\n4 5 \xff\n", "line 2"),
        ("\n \n", "no records"),
        ("", "is empty"),
    ],
)
def test_p5_names_the_line_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        prepare("p5", [path], tmp_path / "store")


def test_p5_drops_and_counts_users_without_items(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("1 2 3\n4\n5 6\n")
    store = prepare("p5", [path], tmp_path / "store", drop_bad_rows=True)
    assert stored_sequences(store) == {1: [(2, 0), (3, 1)], 5: [(6, 0)]}
    assert store.manifest.account == {"rows_in": 4, "rows_kept": 3, "dropped": {"user without items": 1}}


def test_p5_takes_one_file_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "beauty"
    folder.mkdir()
    (folder / "sequential_data.txt").write_text("1 2 3\n2 4\n")
    (folder / "datamaps.json").write_text("{}")
    (folder / "negative_samples.txt").write_text("1 8 9\n")
    store = prepare("p5", [folder], tmp_path / "store")
    assert stored_sequences(store) == {1: [(2, 0), (3, 1)], 2: [(4, 0)]}
    (folder / "sequential_data.txt").rename(folder / "Toys.txt")
    with pytest.raises(UserError, match=r"holds Toys.txt, negative_samples.txt; .* name the file to read"):
        prepare("p5", [folder], tmp_path / "store", overwrite=True)
    with pytest.raises(UserError, match="named twice"):
        prepare("p5", [folder / "Toys.txt", folder / "Toys.txt"], tmp_path / "store", overwrite=True)


def test_recbole(tmp_path: Path) -> None:
    path = tmp_path / "log.inter"
    path.write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        + "".join(f"{u}\t{i}\t3\t{t}\n" for u, i, t in EVENTS)
    )
    check("recbole", path, keep_columns=["rating"])
    path.write_text("user_id:token\titem_id:token_seq\ttimestamp:float\n1\t2 3\t4\n")
    with pytest.raises(UserError, match="is a sequence"):
        check("recbole", path)


KUAIRAND = "user_id,video_id,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view\n"


def test_kuairand_follows_the_published_protocol(tmp_path: Path) -> None:
    folder = tmp_path / "KuaiRand-1K"
    folder.mkdir()
    signals = {(0, 0): "0,0,0,0,0,0,0", (1, 0): "1,0,0,0,0,0,0", (1, 1): "1,0,0,0,0,1,0", (0, 2): "0,0,0,0,0,0,1"}
    log = [(k % 4, k % 5, k, list(signals)[k % 7 % 4]) for k in range(400)]
    lines = [f"{u},{v},{1_650_000_000_000 + 1000 * t},{signals[s]}\n" for u, v, t, s in log]
    (folder / "log_standard_4_08_to_4_21_1k.csv").write_text(KUAIRAND + "".join(lines[:200]))
    (folder / "log_standard_4_22_to_5_08_1k.csv").write_text(KUAIRAND + "".join(lines[200:]))
    (folder / "log_random_4_22_to_5_08_1k.csv").write_text(KUAIRAND + "9,9,1650000000000,1,0,0,0,0,0,0\n")
    (folder / "video_features_basic_1k.csv").write_text("video_id,author_id\n1,2\n")
    store = prepare("kuairand", [folder], tmp_path / "store")
    kept = [(u, v, 1_650_000_000 + t) for u, v, t, s in log if s in ((1, 0), (0, 2))]
    assert stored_sequences(store) == expected_sequences(kept, 5, 5)
    hated = sum(s == (1, 1) for *_, s in log)
    assert store.manifest.account["dropped"] == {
        "hated by the user": hated,
        "no positive signal": len(log) - hated - len(kept),
    }
    options = {"feedback": "all", "min_user_events": 1, "min_item_events": 1, "logs": "both"}
    everything = prepare("kuairand", [folder], tmp_path / "all", **options)  # type: ignore[arg-type]
    assert everything.num_events == 401
    for wrong in ({"logs": "odd"}, {"feedback": "good"}):
        with pytest.raises(UserError, match="choose from"):
            prepare("kuairand", [folder], tmp_path / "wrong", **wrong)  # type: ignore[arg-type]


def test_the_same_log_gives_the_same_store_from_every_format(tmp_path: Path) -> None:
    csv = prepare("csv", [write_csv(tmp_path / "log.csv", EVENTS)], tmp_path / "a")
    parquet = prepare("parquet", [write_parquet(tmp_path / "log.parquet")], tmp_path / "b")
    for name, content in bytes_of(csv).items():
        # The manifest names the source, and the checksums have one of the manifest.
        assert name in ("manifest.json", "checksums.json") or bytes_of(parquet)[name] == content
    assert csv.manifest.content_hash == parquet.manifest.content_hash


def test_an_unknown_source_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'movielens'"):
        prepare("movilens", [], tmp_path / "store")


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    write_csv(tmp_path / "events.csv", EVENTS)
    with pytest.raises(UserError, match=r"evnts.csv does not exist. Did you mean 'events.csv'"):
        prepare("csv", [tmp_path / "evnts.csv"], tmp_path / "store")
    with pytest.raises(UserError, match="holds no Parquet files"):
        prepare("parquet", [tmp_path], tmp_path / "store")
    with pytest.raises(UserError, match="name the delimited files"):
        prepare("csv", [], tmp_path / "store")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pd.DataFrame([[1, 2, 3, 4]], columns=["user_id", "item_id", "timestamp", "item_id"]), "2 columns .*'item_id'"),
        (pd.DataFrame({"user_id": [1], "item_id": [2**70], "timestamp": [5]}), "'item_id' .*does not fit 64 bits"),
        (
            pd.DataFrame({"user_id": [1], "item_id": ["\ud800"], "timestamp": [5]}, dtype=object),
            "'item_id' .*surrogate",
        ),
        (pd.DataFrame({"user_id": [1, 2], "item_id": [1, "a"], "timestamp": [5, 6]}), "'item_id' .*several types"),
        (pl.DataFrame({"user_id": [1], "item_id": [2**70], "timestamp": [5]}), "'item_id' .*cannot be converted"),
    ],
)
def test_a_table_that_does_not_convert_names_the_column(tmp_path: Path, table: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_table(table, tmp_path / "store")
