"""Every file of a store has a checksum; one flipped bit anywhere is found, also in what is added later."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.training.conftest import write_store
from turbogr import cli
from turbogr.data.item_info import write_item_info
from turbogr.data.store import Store, read_range
from turbogr.data.store_checksums import NO_CHECKSUMS, store_damages
from turbogr.data.store_copy import copy_store
from turbogr.data.vocabulary import Vocabulary
from turbogr.errors import UserError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = write_store(tmp_path / "store")
    add_titles(store, "title")
    return store


def add_titles(store: Store, title: str) -> None:
    table = pa.table({"id": store.item_ids.ids, "name": [f"{title} {n}" for n in range(store.num_items)]})
    write_item_info(store, table, id_column="id", title_column="name", source="test")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_flipped_bit_in_any_file_of_a_store_is_found(store: Store) -> None:
    assert store_damages(store.path) == ([], None)
    files = sorted(store.path.iterdir())
    assert {"checksums.json", "manifest.json", "items.npy", "item_info.parquet"} <= {file.name for file in files}
    for file in files:
        before = file.read_bytes()
        for bit in {3, 8 * 70 + 1, 4 * len(before), 8 * len(before) - 1}:
            flip(file, bit)
            sentences, _ = store_damages(store.path)
            assert len(sentences) == 1 and file.name in sentences[0], (file, bit, sentences)
            file.write_bytes(before)
    assert store_damages(store.path) == ([], None)


def test_a_missing_file_is_found_and_item_info_may_be_removed(store: Store) -> None:
    (store.path / "item_info.parquet").unlink()
    assert store_damages(store.path) == ([], None)
    (store.path / "times.npy").unlink()
    assert store_damages(store.path) == ([f"{store.path / 'times.npy'} is missing"], None)


def test_replaced_item_info_and_a_copy_of_the_store_are_whole(store: Store, tmp_path: Path) -> None:
    before = (store.path / "item_info.parquet").read_bytes()
    copy_store(store, tmp_path / "copy")
    add_titles(store, "another title")
    assert store_damages(store.path) == ([], None)
    assert store_damages(tmp_path / "copy") == ([], None)
    (store.path / "item_info.parquet").write_bytes(before)  # as after a kill before the new file got its name
    assert store_damages(store.path) == ([], None)


def test_a_store_of_an_earlier_release_is_compared_as_far_as_possible(store: Store) -> None:
    (store.path / "checksums.json").unlink()
    assert store_damages(store.path) == ([], NO_CHECKSUMS)
    flip(store.path / "items.npy", 8 * 200)
    sentences, remark = store_damages(store.path)
    assert remark == NO_CHECKSUMS and "items.npy is damaged" in sentences[0]


def test_inspect_verify_of_a_store(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(store.path), "--verify"]) == 0
    assert "as it was written" in capsys.readouterr().out
    flip(store.path / "times.npy", 4000)
    assert cli.main(["inspect", str(store.path), "--verify"]) == 1
    assert "times.npy is not what was written" in capsys.readouterr().out


# Reading a store that changes or is damaged.


def test_a_replaced_store_is_read_as_it_was_opened(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", seed=1)
    expected = np.array(store.items), store.item_counts()
    shutil.rmtree(tmp_path / "store")
    other = write_store(tmp_path / "store", seed=2)
    assert not np.array_equal(other.items, expected[0])
    assert np.array_equal(read_range(store.items, 0, store.num_events), expected[0])
    assert np.array_equal(store.item_counts(), expected[1])


def test_open_files_end_with_the_store(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(20):
        Store.open(tmp_path / "store")
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before + 20


@pytest.mark.parametrize(
    ("offsets", "data"),
    [
        ([0, 2**40, 6], b"abcdef"),
        ([0, -8, 6], b"abcdef"),
        ([0, 5, 3, 6], b"abcdef"),
        ([0, 2, 6], b"a\xff\xffdef"),
        ([0, 3, 9], b"abcdef"),
        ([1, 3, 6], b"abcdef"),
        ([], b""),
    ],
)
def test_damaged_text_ids_are_an_error(offsets: list[int], data: bytes) -> None:
    for use in (
        lambda v: v.decode(np.arange(len(v))),
        lambda v: v.encode(["abc"]),
        lambda v: v.encode([f"{n}" for n in range(2000)]),
        lambda v: v.fingerprint(len(v)),
    ):
        with pytest.raises(UserError, match=r"the ids in items are damaged; prepare the store again"):
            use(Vocabulary.of_text(np.array(offsets, np.int64), np.frombuffer(data, np.uint8), None, "items"))


@pytest.mark.parametrize("order", [[0, 1, 7], [0, -1, 1], [0, 1]])
@pytest.mark.parametrize("text", [True, False])
def test_a_damaged_order_of_ids_is_an_error(order: list[int], text: bool) -> None:
    ids = pa.array(["a", "b", "c"], pa.large_string()) if text else np.array([1, 2, 3])
    with pytest.raises(UserError, match="the ids in items are damaged"):
        Vocabulary(ids, np.array(order), "items").encode(["c", "a", "b"] if text else [3, 1, 2])
