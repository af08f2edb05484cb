from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import turbogr
from tests.stores import write_store
from turbogr.data.item_info import ItemInfo
from turbogr.data.store import Store
from turbogr.data.store_copy import check_content, copy_store, store_bytes, store_files
from turbogr.errors import UserError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_store(tmp_path / "store", [[0, 1, 2], [2, 1, 0, 3]], 4)


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_is_the_same_store(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("other file system")))
    copy_store(store, tmp_path / "copy")
    copy = Store.open(tmp_path / "copy")
    check_content(copy)
    assert copy.manifest == store.manifest
    assert np.array_equal(copy.items, store.items) and np.array_equal(copy.times, store.times)
    assert copy.item_ids.decode([3]).tolist() == ["item-003"]
    assert os.path.samefile(store.path / "items.npy", copy.path / "items.npy") == links
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "store"]
    assert store_bytes(copy) == sum(file.stat().st_size for file in copy.path.iterdir())


def test_what_is_known_of_the_items_is_copied_too(store: Store, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,title\nitem-001,One\n")
    turbogr.add_item_info(store.path, tmp_path / "items.csv")
    copy_store(store, tmp_path / "copy")
    info = ItemInfo.of(Store.open(tmp_path / "copy"))
    assert info is not None and info.titles([1]) == ["One"]


def test_a_copy_replaces_an_older_one(store: Store, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other", [[0, 1, 2]], 3)
    copy_store(other, tmp_path / "copy")
    copy_store(store, tmp_path / "copy")
    assert Store.open(tmp_path / "copy").manifest == store.manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "other", "store"]


def test_a_store_that_was_replaced_meanwhile_is_not_copied(store: Store, tmp_path: Path) -> None:
    for file in store_files(store):
        file.unlink()
    store.path.rmdir()
    write_store(tmp_path / "store", [[0, 1, 2], [2, 1, 0, 1]], 4)
    with pytest.raises(UserError, match="was replaced by other data meanwhile"):
        copy_store(store, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


@pytest.mark.parametrize("name", ["items", "times", "offsets", "user_ids", "item_ids.bytes"])
def test_a_changed_byte_of_any_column_is_found(store: Store, tmp_path: Path, name: str) -> None:
    check_content(store)
    file = store.path / f"{name}.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        check_content(Store.open(store.path) if name != "offsets" else store)
