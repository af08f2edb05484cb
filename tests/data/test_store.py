from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from turbogr.data import atomic_folder
from turbogr.data import store as store_module
from turbogr.data.store import Manifest, Store
from turbogr.data.store_summary import summarise
from turbogr.data.store_writer import StoreWriter
from turbogr.errors import UserError
from turbogr.option_names import command_line


def write(path: Path, *, items: int = 4, overwrite: bool = False) -> Store:
    with StoreWriter(path, overwrite=overwrite) as writer:
        writer.append("offsets", np.array([0, 2, 2, 5]))
        writer.append("items", np.array([0, 1], np.int32))
        writer.append("items", np.array([2, 3, 0], np.int32))
        writer.append("times", np.arange(5) * 10)
        writer.append("action.like", np.array([0, 1, 0, 0, 1], np.int8))
        writer.write_vocabulary("user_ids", pa.array(["a", "b", "é"]))
        writer.write_vocabulary("item_ids", np.arange(items) * 5)
        account = {"rows_in": 5, "rows_kept": 5, "dropped": {}}
        return writer.commit(Manifest("test", 3, items, 5, "leave-one-out", "real", account))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    assert store.offsets.tolist() == [0, 2, 2, 5]
    assert store.items.tolist() == [0, 1, 2, 3, 0]
    assert store.times.dtype == np.int64
    assert store.actions["like"].tolist() == [0, 1, 0, 0, 1]
    assert store.user_ids.decode([2, 0]).tolist() == ["é", "a"]
    assert store.item_ids.encode([15, 1]).tolist() == [3, -1]
    assert store.lengths.tolist() == [2, 0, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_columns_are_memory_mapped(tmp_path: Path) -> None:
    store = write(tmp_path / "store")
    for column in (store.offsets, store.items, store.times, store.actions["like"], store.item_ids.ids):
        assert isinstance(column, np.memmap)


def test_item_counts_up_to_the_ends(tmp_path: Path) -> None:
    store = write(tmp_path / "store")
    assert store.item_counts().tolist() == [2, 1, 1, 1]
    assert store.item_counts(np.array([1, 2, 4])).tolist() == [1, 0, 1, 1]


def test_user_blocks_cover_all_users_once(tmp_path: Path) -> None:
    store = write(tmp_path / "store")
    for max_events in (1, 2, 3, 100):
        blocks = list(store.user_blocks(max_events))
        assert [user for first, last in blocks for user in range(first, last)] == [0, 1, 2]


def test_the_content_hash_follows_the_content_alone(tmp_path: Path) -> None:
    first, second, other = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", items=5)
    assert first.manifest.content_hash == second.manifest.content_hash != other.manifest.content_hash


def test_an_existing_target_is_refused_and_kept(tmp_path: Path) -> None:
    write(tmp_path / "store")
    with pytest.raises(UserError, match="already exists"):
        StoreWriter(tmp_path / "store")
    assert Store.open(tmp_path / "store").num_events == 5


def test_only_stores_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("42")
    with pytest.raises(UserError, match="not a prepared store"):
        StoreWriter(tmp_path / "precious", overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "42"


def test_a_folder_with_a_manifest_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "thesis.txt").write_text("42")
    for manifest in (
        '{"name": "my web app"}',
        "[1]",
        "{",
        '{"schema_version": 3}',
        '{"columns": {}, "schema_version": "3"}',
    ):
        (project / "manifest.json").write_text(manifest)
        with pytest.raises(UserError, match="not a prepared store"):
            StoreWriter(project, overwrite=True)
    assert (project / "thesis.txt").read_text() == "42"


def test_a_store_with_other_files_in_it_is_not_overwritten(tmp_path: Path) -> None:
    note = write(tmp_path / "store").path / "notes.txt"
    note.write_text("42")
    with pytest.raises(UserError, match=r"holds notes\.txt, which is no part of the store"):
        write(tmp_path / "store", overwrite=True)
    note.unlink()
    write(tmp_path / "store", items=9, overwrite=True)


@pytest.mark.parametrize("what", ["folder", "file", "store", "link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appears_at_the_target_while_writing_is_kept(tmp_path: Path, what: str, overwrite: bool) -> None:
    target = tmp_path / "store"
    with StoreWriter(target, overwrite=overwrite) as writer:
        writer.append("offsets", np.array([0, 1]))
        if what == "folder":
            target.mkdir()
            (target / "thesis.txt").write_text("42")
        elif what == "file":
            target.write_text("42")
        elif what == "link":
            target.symlink_to(tmp_path / "elsewhere")
        else:
            write(target, items=7)
            (target / "notes.txt").write_text("42")
        message = "no part of the store|not a prepared store" if overwrite else "appeared while its data was prepared"
        with pytest.raises(UserError, match=message):
            writer.commit(Manifest("test", 1, 1, 1, "leave-one-out", "real", {}))
    assert [file.name for file in tmp_path.iterdir()] == ["store"]
    if what == "store":
        assert Store.open(target).num_items == 7
    elif what == "link":
        assert target.is_symlink()
    else:
        assert (target / "thesis.txt" if what == "folder" else target).read_text() == "42"


def test_folders_that_were_made_for_nothing_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "a" / "b" / "c" / "store"):
        raise RuntimeError
    assert not any((tmp_path / "a").iterdir())
    write(tmp_path / "a" / "b" / "c" / "store")


def test_an_empty_name_is_no_target() -> None:
    with pytest.raises(UserError, match="--out is empty"):
        StoreWriter("")


@pytest.mark.parametrize("exchange", [True, False])
def test_overwriting_replaces_the_whole_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", lambda first, second: False)
    write(tmp_path / "store")
    write(tmp_path / "store", items=9, overwrite=True)
    assert Store.open(tmp_path / "store").num_items == 9
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with StoreWriter(tmp_path / "store") as writer:
            writer.append("items", np.zeros(3))
            (writer.scratch / "x").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is full"), StoreWriter(tmp_path / "store"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    abandoned = tmp_path / ".store.partial-abc"
    abandoned.mkdir()
    (abandoned / "items.npy").write_bytes(b"half")
    with StoreWriter(tmp_path / "store") as running:
        write(tmp_path / "store")
        assert running.folder.exists(), "a writer at work must not be disturbed"
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_a_missing_store_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist.*turbogr prepare"):
        Store.open(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a prepared store"):
        Store.open(tmp_path)
    (tmp_path / "clicks.csv").write_text("user,item\n")
    with command_line(), pytest.raises(UserError, match=r"turbogr prepare csv \S*clicks\.csv --out data/clicks`"):
        Store.open(tmp_path / "clicks.csv")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "store").path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(UserError, match=r"version 99.*prepare the store again"):
        Store.open(tmp_path / "store")


@pytest.mark.parametrize("damage", ["missing", "short", "longer", "manifest"])
def test_a_damaged_store_is_refused(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "store").path
    if damage == "missing":
        (path / "items.npy").unlink()
    elif damage == "short":
        os.truncate(path / "items.npy", 130)
    elif damage == "longer":
        shutil.copy(path / "offsets.npy", path / "times.npy")
    else:
        os.truncate(path / "manifest.json", 100)
    with pytest.raises(UserError, match="prepare the store again"):
        Store.open(path)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": []},
        {"columns": {"items": 1}},
        {"num_users": 5},
        {"num_users": "3"},
        {"num_users": -1},
        {"num_items": 3},
        {"num_events": 4},
        {"account": None},
        {"split": 7},
        {"surprise": 1},
    ],
)
def test_a_manifest_that_does_not_fit_the_columns_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write(tmp_path / "store").path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match="prepare the store again"):
        Store.open(tmp_path / "store")


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "store").path
    (path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is damaged"):
        Store.open(path)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("items", np.array([0, 1, 2, 3, 4], np.int32), "beyond the 4 items"),
        ("items", np.array([0, 1, 2, 3, -1], np.int32), "beyond the 4 items"),
        ("offsets", np.array([0, 4, 2, 5]), "does not ascend"),
        ("times", np.array([0, 1, 2, 3, 2**62]), "outside 1970 to 2200"),
    ],
)
def test_wrong_values_in_a_store_are_an_error_when_it_is_read(
    tmp_path: Path, column: str, values: Any, message: str
) -> None:
    path = write(tmp_path / "store").path
    np.save(path / f"{column}.npy", values)
    with pytest.raises(UserError, match=rf"{column}\.npy .*{message}.*; prepare the store again"):
        summarise(Store.open(path))


def test_a_name_with_wildcards_removes_its_own_leftovers_alone(tmp_path: Path) -> None:
    own, other = tmp_path / ".log[ab]*.partial-x", tmp_path / ".loga1.partial-x"
    own.mkdir()
    other.mkdir()
    write(tmp_path / "log[ab]*")
    assert not own.exists()
    assert other.exists()


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "store")
    write(tmp_path / "link")
    write(tmp_path / "link", items=9, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert Store.open(tmp_path / "disk" / "store").num_items == Store.open(tmp_path / "link").num_items == 9
    assert [file.name for file in (tmp_path / "disk").iterdir()] == ["store"]


def test_a_folder_that_another_writer_cleans_away_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "store"
    make, opened = os.mkdir, os.open
    cleaned: list[str] = []

    def cleaned_before_it_is_opened(folder: Path, *rest: Any) -> None:
        make(folder, *rest)
        if not cleaned:
            cleaned.append(str(folder))
            atomic_folder.remove_abandoned(target)

    def cleaned_before_it_is_locked(path: Path, flags: int, *rest: Any, **named: Any) -> int:
        handle = opened(path, flags, *rest, **named)
        if len(cleaned) == 1 and flags == os.O_RDONLY:
            cleaned.append(str(path))
            atomic_folder.remove_abandoned(target)
        return handle

    monkeypatch.setattr(os, "mkdir", cleaned_before_it_is_opened)
    monkeypatch.setattr(os, "open", cleaned_before_it_is_locked)
    write(target)
    assert len(cleaned) == 2
    assert not any(os.path.exists(folder) for folder in cleaned)
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_a_failed_second_rename_puts_the_old_store_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "store")
    rename = os.rename

    def fail(old: Path, new: Path) -> None:
        if ".partial-" in old.name:
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(atomic_folder, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "store", items=9, overwrite=True)
    assert Store.open(tmp_path / "store").num_items == 4
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("moment", ["manifest", "times"])
def test_a_store_that_is_replaced_while_it_is_opened_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    write(tmp_path / "store")
    mapped = store_module._map
    replaced: list[str] = []

    def replace_once(path: Path, name: str, manifest: Manifest) -> Any:
        if not replaced and (moment == "manifest" or name == moment):
            replaced.append(name)
            write(tmp_path / "store", items=9, overwrite=True)
        return mapped(path, name, manifest)

    monkeypatch.setattr(store_module, "_map", replace_once)
    store = Store.open(tmp_path / "store")
    assert replaced
    assert store.num_items == len(store.item_ids) == 9
