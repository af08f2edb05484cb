"""Store: a prepared interaction log as a folder of memory-mapped .npy columns and a manifest.

`offsets` [U + 1] cuts the event columns `items`, `times` and the actions into users; events are sorted by (user,
time, original row). Opening reads the manifest and maps the files, so it takes milliseconds and no memory whatever
the size. Writing happens in a folder beside the target that is renamed into place as the last act, so a reader
never sees half a store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from turbogr import __version__
from turbogr.data.ranges import add_counts
from turbogr.data.replacing import (
    left_beside,
    make_beside,
    move_into_free_place,
    move_into_place,
    remove_abandoned,
    restore,
)
from turbogr.data.vocabulary import Int64Array, Vocabulary
from turbogr.errors import UserError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_CHUNK_EVENTS = 1 << 20


@dataclass(frozen=True)
class Column:
    """One .npy file of the store: its type, its length and the SHA-256 of its data."""

    dtype: str
    length: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store holds and how it came about; `manifest.json` on disk.

    `times` is "real" (seconds since 1970) or "positions" (the log had an order but no times). `split` is the default
    rule of `Split.of`. `account` maps "rows_in", "rows_kept" and "dropped" (reason -> rows). In a store that extends
    another, rows below `known_users` and `known_items` are those of the store whose content hash is `extends`.
    """

    source: str
    num_users: int
    num_items: int
    num_events: int
    split: str
    times: str
    account: dict[str, Any]
    filters: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    extends: str | None = None
    known_users: int = 0
    known_items: int = 0
    columns: dict[str, Column] = field(default_factory=dict)
    content_hash: str = ""
    time_unit: str = "seconds"
    schema_version: int = SCHEMA_VERSION
    turbogr_version: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        raw = json.loads(text)
        raw["columns"] = {name: Column(**column) for name, column in raw["columns"].items()}
        manifest = cls(**raw)
        for known in dataclasses.fields(cls):
            value, default = getattr(manifest, known.name), getattr(_EXAMPLE, known.name)
            if not isinstance(value, type(default)) and not (known.name == "extends" and isinstance(value, str)):
                raise TypeError(f"{known.name} is {value!r}")
        return manifest

    @property
    def actions(self) -> tuple[str, ...]:
        """Names of the action columns, sorted."""
        return tuple(sorted(name[len("action.") :] for name in self.columns if name.startswith("action.")))

    @property
    def ties(self) -> tuple[str, int] | None:
        """How a user's events at the same time are ordered ("file" or "random"), and how many have the time of the one
        before them; None where the log had no times, or in stores written before this was counted."""
        found = self.settings.get("ties")
        return None if found is None else (found["order"], found["events"])


_EXAMPLE = Manifest("", 0, 0, 0, "", "", {})


class Store:
    """A prepared log. U users, V items, E events.

    Attributes:
        offsets: int64 [U + 1]; user u's events are offsets[u]:offsets[u + 1].
        items: int32 or int64 [E], the item's row, 0 to V - 1.
        times: int64 [E], seconds (or positions, see the manifest).
        actions: name -> [E].
        user_ids, item_ids: raw ids of the rows.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.offsets: Int64Array = _map(path, "offsets", manifest)
        self.items: NDArray[np.integer[Any]] = _map(path, "items", manifest)
        self.times: Int64Array = _map(path, "times", manifest)
        self.actions: dict[str, NDArray[Any]] = {
            name: _map(path, f"action.{name}", manifest) for name in manifest.actions
        }
        self.user_ids = _map_vocabulary(path, "user_ids", manifest)
        self.item_ids = _map_vocabulary(path, "item_ids", manifest)
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raise UserError where the columns do not go together; looks at lengths and at both ends of the offsets."""
        users, items, events = self.num_users, self.num_items, self.num_events
        whole = len(self.offsets) == users + 1 >= 2 and self.offsets[0] == 0 and self.offsets[-1] == events
        columns = (self.items, self.times, *self.actions.values())
        whole = whole and all(len(column) == events for column in columns)
        if not (whole and len(self.user_ids) == users and len(self.item_ids) == items):
            raise UserError(f"the columns of {self.path} do not fit its manifest; prepare the store again")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Map the store at `path`.

        Raises:
            UserError: there is no store, it is of another schema version, or a file is missing or cut short.
        """
        path = Path(path)
        while True:
            before = _folder_at(path)
            try:
                store = cls(path, read_manifest(path))
            except UserError:
                if _folder_at(path) == before:
                    raise
                continue
            if _folder_at(path) == before:
                return store
            # It was replaced meanwhile, so what was read may be half the old store and half the new one.

    @property
    def num_users(self) -> int:
        return self.manifest.num_users

    @property
    def num_items(self) -> int:
        return self.manifest.num_items

    @property
    def num_events(self) -> int:
        return self.manifest.num_events

    @property
    def lengths(self) -> Int64Array:
        """Events per user, int64 [U]."""
        return np.diff(self.offsets)

    def user_blocks(self, max_events: int = _CHUNK_EVENTS) -> Iterator[tuple[int, int]]:
        """Yield (first, last + 1) of consecutive users that hold about `max_events` events together."""
        first = 0
        while first < self.num_users:
            limit = self.offsets[first] + max_events
            end = max(int(np.searchsorted(self.offsets, limit, side="right")) - 1, first + 1)
            yield first, min(end, self.num_users)
            first = end

    def item_counts(self, ends: Int64Array | None = None) -> Int64Array:
        """Count how often every item occurs, int64 [V], over all events or over offsets[u]:ends[u] of every user.

        Raises:
            UserError: an event names an item that the store does not have.
        """
        counts = np.zeros(self.num_items, np.int64)
        for first, last in self.user_blocks():
            start, stop = int(self.offsets[first]), int(self.offsets[last])
            items = read_range(self.items, start, stop)
            if len(items) and not (items.min() >= 0 and items.max() < self.num_items):
                raise UserError(
                    f"{self.path / 'items.npy'} holds rows beyond the {self.num_items:,} items; prepare the store again"
                )
            if ends is not None:
                limit = np.repeat(ends[first:last], np.diff(self.offsets[first : last + 1]))
                items = items[np.arange(start, stop) < limit]
            add_counts(counts, items)
        return counts

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}: {self.num_users:,} users, {self.num_items:,} items, {self.num_events:,} events)"
        )


def _folder_at(path: Path) -> tuple[int, int] | None:
    """Return what tells the folder at `path` from one that replaces it, None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_range(column: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """Read column[start:stop] of a store into memory of its own.

    For passes over a whole column: slices of the mapped file would count, page by page, as memory of this process.
    """
    assert isinstance(column, np.memmap), "columns of a store are memory-mapped"
    assert column.filename is not None
    place = column.offset + start * column.dtype.itemsize
    return np.fromfile(column.filename, column.dtype, stop - start, offset=place)


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the store at `path` (see `Store.open` for what it raises)."""
    try:
        text = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a prepared store (it has no manifest.json)" if path.exists() else "does not exist"
        previous = left_beside(Path(os.path.realpath(path)))
        if previous is not None:
            raise UserError(
                f"{path} was being replaced when the process died; {previous} is the old store: rename it back or "
                "prepare again"
            ) from None
        raise UserError(f"{path} {what}; make one with `turbogr prepare SOURCE PATH --out {path}`") from None
    try:
        raw = json.loads(text)
        version = raw["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / MANIFEST} is damaged; prepare the store again") from None
    if version != SCHEMA_VERSION:
        writer = raw.get("turbogr_version") or "another version"
        raise UserError(
            f"{path} has store version {version} (written by turbogr {writer}), but this turbogr reads version "
            f"{SCHEMA_VERSION}; prepare the store again"
        )
    try:
        return Manifest.from_json(text)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path / MANIFEST} is damaged; prepare the store again") from None


def _map(path: Path, name: str, manifest: Manifest) -> Any:
    """Map one column, or raise UserError where the file does not hold what the manifest says."""
    file = path / f"{name}.npy"
    column = manifest.columns.get(name)
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{file} is missing; prepare the store again") from None
    except (ValueError, EOFError, OSError):
        raise UserError(f"{file} is damaged or cut short; prepare the store again") from None
    if column is None or array.dtype.str != column.dtype or array.shape != (column.length,):
        raise UserError(f"{file} does not hold what the manifest says; prepare the store again")
    return array


def _map_vocabulary(path: Path, name: str, manifest: Manifest) -> Vocabulary:
    order = _map(path, f"{name}.order", manifest) if f"{name}.order" in manifest.columns else None
    if name in manifest.columns:
        return Vocabulary(_map(path, name, manifest), order)
    return Vocabulary.of_text(_map(path, f"{name}.offsets", manifest), _map(path, f"{name}.bytes", manifest), order)


class ColumnFile:
    """A .npy file that grows; its header is written when it is closed."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.length = 0
        self._hash = hashlib.sha256()
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 - lives as long as the object
        self._write_header()

    def _write_header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, self.dtype)
        self._hash.update(data.data)
        self._file.write(data.data)
        self.length += len(data)

    def close(self) -> Column:
        """Write the header, flush to the disk and return the column's record."""
        end = self._file.tell()
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() + self.length * self.dtype.itemsize == end, "the header must not change its size"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Column(self.dtype.str, self.length, self._hash.hexdigest())

    def abandon(self) -> None:
        self._file.close()


class StoreWriter:
    """Writes a store beside `target` and renames it into place on `commit`; use as a context manager.

    Leaving the context without a commit removes everything, also the parent folders that were made. A folder left
    behind by a killed writer is removed by the next writer of the same target.

    Raises:
        UserError: `target` exists, now or at the commit, and `overwrite` is False or it is not a store with nothing
            else in it; the disk is full.
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        if not os.fspath(target):
            raise UserError("--out is empty; name a folder to write to")
        self.target = Path(os.path.realpath(target))  # a link stays, and what it leads to is replaced
        self._overwrite = overwrite
        self._columns: dict[str, ColumnFile] = {}
        restore(self.target)
        if os.path.lexists(self.target):
            if not overwrite:
                raise UserError(f"{target} already exists; choose another --out or pass --overwrite")
            _refuse_to_lose(self.target)
        missing = itertools.takewhile(lambda folder: not folder.exists(), self.target.parents)
        self._made_parents = list(missing)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.target)
            self.folder, self._lock = make_beside(self.target)
        except OSError as error:
            self._remove_parents()
            raise UserError(f"cannot write to {self.target.parent}: {error.strerror}") from error

    def _remove_parents(self) -> None:
        for folder in self._made_parents:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                folder.rmdir()

    @property
    def scratch(self) -> Path:
        """A folder for temporary files that is gone after the commit."""
        folder = self.folder / "scratch"
        folder.mkdir(exist_ok=True)
        return folder

    def append(self, name: str, values: NDArray[Any], dtype: DTypeLike | None = None) -> None:
        """Append `values` to the column `name`; the first call fixes its type."""
        if name not in self._columns:
            self._columns[name] = ColumnFile(self.folder / f"{name}.npy", values.dtype if dtype is None else dtype)
        self._columns[name].append(values)

    def write_vocabulary(self, name: str, ids: Any, order: Int64Array | None = None) -> None:
        """Write raw ids by row: an int64 array, or an Arrow string array, with the order that sorts them if needed."""
        if isinstance(ids, np.ndarray):
            self.append(name, ids, np.int64)
        else:
            ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
            ids = ids.cast(pa.large_string())
            _, offset_buffer, data_buffer = ids.buffers()
            offsets = np.frombuffer(offset_buffer, np.int64)[ids.offset : ids.offset + len(ids) + 1]
            data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.zeros(0, np.uint8)
            self.append(f"{name}.offsets", offsets - offsets[0], np.int64)
            self.append(f"{name}.bytes", data[offsets[0] : offsets[-1]], np.uint8)
        if order is not None:
            self.append(f"{name}.order", order, np.int64)

    def commit(self, manifest: Manifest) -> Store:
        """Finish the columns, complete the manifest with their hashes, and rename the folder to the target."""
        columns = {name: column.close() for name, column in sorted(self._columns.items())}
        manifest = dataclasses.replace(
            manifest, columns=columns, content_hash=_content_hash(columns, manifest), turbogr_version=__version__
        )
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)
        with open(self.folder / MANIFEST, "w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(self.folder, 0o777 & ~_umask())
        os.fsync(self._lock)
        self._move_into_place()
        self._close()
        return Store.open(self.target)

    def _move_into_place(self) -> None:
        """Rename the folder to the target; what has appeared there since the start is as safe as before it."""
        replaced = None
        if self._overwrite:
            if os.path.lexists(self.target):
                _refuse_to_lose(self.target)
            replaced = move_into_place(self.folder, self.target)
        elif not move_into_free_place(self.folder, self.target):
            raise UserError(
                f"{self.target} appeared while its data was prepared and is left as it is; choose another --out or "
                "pass --overwrite"
            )
        _fsync_folder(self.target.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock < 0:
            return
        for column in self._columns.values():
            column.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._remove_parents()
        self._close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk of {self.target.parent} is full; nothing was written. Free space or choose another --out"
            ) from error


def _refuse_to_lose(target: Path) -> None:
    """Raise UserError unless `target` is an empty folder, or a store of any version with nothing else in it."""
    refusal = f"{target} is not a prepared store, so it is not overwritten; choose another --out or remove it yourself"
    if target.is_dir() and not any(target.iterdir()):
        return
    try:
        raw = json.loads((target / MANIFEST).read_bytes())
        named = {MANIFEST, *(f"{name}.npy" for name in raw["columns"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(refusal) from None
    if not isinstance(raw.get("schema_version"), int) or not isinstance(raw["columns"], dict):
        raise UserError(refusal)
    for file in sorted(target.iterdir()):
        if file.name not in named:
            raise UserError(
                f"{target} holds {file.name}, which is no part of the store, so it is not overwritten; move that away "
                "or choose another --out"
            )


def _content_hash(columns: Mapping[str, Column], manifest: Manifest) -> str:
    """Hash of the data and of how it is to be read; not of options that left no trace in the data."""
    lines: Iterable[str] = (
        f"{name} {column.dtype} {column.length} {column.sha256}" for name, column in columns.items()
    )
    text = "\n".join([*lines, manifest.split, manifest.times])
    return hashlib.sha256(text.encode()).hexdigest()


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
