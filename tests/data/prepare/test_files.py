"""Files that are compressed, misnamed, named twice or no files at all, and public data sets under other names."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turbogr.commands import inspect
from turbogr.data.prepare.data_warnings import DataWarning
from turbogr.data.prepare.preparation import prepare, prepare_table
from turbogr.data.prepare.progress_bar import Progress
from turbogr.data.prepare.sources.event_generator import Synthetic
from turbogr.data.split import Split
from turbogr.data.store_summary import summarise
from turbogr.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

RECORDS = [(k % 3, k % 5, 1_650_000_000 + k) for k in range(30)]
LOG = ("user_id,item_id,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t in RECORDS)).encode()


def lz4(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("compress", [gzip.compress, lz4, zstd, bz2.compress, lambda data: bz2.compress(data, 1)])
def test_a_compression_is_seen_without_its_suffix(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / "log.csv").write_bytes(compress(LOG))
    assert prepare("csv", tmp_path / "log.csv", tmp_path / "store").num_events == 30


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("log.csv", data)
    return file.getvalue()


@pytest.mark.parametrize(("compress", "suffix"), [(lzma.compress, "xz"), (zipped, "zip")])
def test_a_compression_that_is_not_read_is_named(
    tmp_path: Path, compress: Callable[[bytes], bytes], suffix: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_bytes(LOG)
    for name in (f"b.csv.{suffix}", "b.csv"):
        path = tmp_path / "in" / name
        path.write_bytes(compress(LOG))
        with pytest.raises(UserError, match=f"is {suffix}-compressed.*unpack it"):
            prepare("csv", tmp_path / "in", tmp_path / "store")
        path.unlink()


def test_a_parquet_file_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": [1], "item_id": [2], "timestamp": [3]}), tmp_path / "log.csv")
    with pytest.raises(UserError, match="is a Parquet file; read it with the source 'parquet'"):
        prepare("csv", tmp_path / "log.csv", tmp_path / "store")


def test_a_damaged_page_of_parquet_is_seen_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    table = pa.table(
        {"user_id": [1, 2] * 500, "item_id": range(1000), "timestamp": range(1_650_000_000, 1_650_001_000)}
    )
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    pq.write_table(table, path, **options)
    data = bytearray(path.read_bytes())
    data[data.index(np.int64(700).tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"log\.parquet is damaged"):
        prepare("parquet", path, tmp_path / "store")


def test_a_path_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe is no regular file.*write it to one first"):
        prepare("csv", tmp_path / "pipe", tmp_path / "store")


def test_a_file_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(LOG)
    (tmp_path / "b.csv").symlink_to(tmp_path / "a.csv")
    pq.write_table(pa.table({"user_id": [1], "item_id": [2], "timestamp": [3]}), tmp_path / "a.parquet")
    for source, paths in (
        ("csv", [tmp_path / "a.csv", tmp_path / "a.csv"]),
        ("csv", [tmp_path / "a.csv", tmp_path / "*.csv"]),
        ("csv", [tmp_path]),
        ("parquet", [tmp_path / "a.parquet", tmp_path]),
        ("parquet", [tmp_path / "a.parquet", tmp_path / ".." / tmp_path.name / "a.parquet"]),
    ):
        with pytest.raises(UserError, match=r"is named twice.*name every file once"):
            prepare(source, paths, tmp_path / "store")


def test_utf_32_and_utf_16_are_read(tmp_path: Path) -> None:
    for encoding in ("utf-32", "utf-32-be", "utf-16"):
        mark = "\ufeff" if encoding.endswith("be") else ""
        (tmp_path / "log.csv").write_bytes((mark + LOG.decode()).encode(encoding))
        store = prepare("csv", tmp_path / "log.csv", tmp_path / "store", overwrite=True)
        assert store.num_events == LOG.count(b"\n") - 1


@pytest.mark.parametrize("between", ["::", "\t"])
def test_movielens_under_another_name(tmp_path: Path, between: str) -> None:
    path = tmp_path / "ml-1m.txt"
    path.write_text("".join(between.join(map(str, (u, i, 5, t))) + "\n" for u, i, t in RECORDS))
    assert prepare("movielens", path, tmp_path / "store").num_events == 30


def test_amazon_ratings_that_begin_with_a_wrong_record(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text("A1,B1,5.0,soon\n" + "".join(f"A{u},B{i},5.0,{t}\n" for u, i, t in RECORDS))
    with pytest.raises(UserError, match="line 1: the time 'soon'"):
        prepare("amazon", path, tmp_path / "store")
    store = prepare("amazon", path, tmp_path / "store", drop_bad_rows=True, min_user_events=1, min_item_events=1)
    assert store.manifest.account["dropped"] == {"unreadable time": 1}


def test_an_error_names_the_range_of_a_generator_setting() -> None:
    with pytest.raises(UserError, match=r"--median-length must lie between 1 and --mean-length \(20\), but it is 42"):
        Synthetic(mean_length=20)


def test_a_bar_is_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Progress(True).stage("reading", 10, "records").disable
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert not Progress(True).stage("reading", 10, "records").disable
    assert Progress(False).stage("reading", 10, "records").disable


def test_ids_cannot_command_the_terminal(tmp_path: Path) -> None:
    ids = ["\x1b[31mred", "a\u202eb", "z" * 5000]
    table = pa.table({"user_id": ["u\r", "v", "u\r"], "item_id": ids, "timestamp": [1_650_000_000] * 3})
    store = prepare_table(table, tmp_path / "store")
    text = inspect.describe(store, summarise(store), 3, 10)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert r"\x1b[31mred" in text
    assert "z" * 100 not in text


def test_one_is_singular(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\nu,a,1650000000\nu,A,1650000001\nv,b,1650000002\n")
    with pytest.warns(DataWarning, match="1 item id differs from another one only in case .* it is kept apart"):
        store = prepare("csv", tmp_path / "log.csv", tmp_path / "store")
    assert "the last item of 1 user is the test item" in Split.of(store).describe()
