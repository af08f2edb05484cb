"""Store: a prepared interaction log as a folder of memory-mapped .npy columns and a manifest.

`offsets` [U + 1] cuts the event columns `items`, `times` and the actions into users; events are sorted by (user,
time, order of the log). Opening reads the manifest and maps the files, so it takes milliseconds and no memory whatever
the size. `turbogr.data.store_writer` writes stores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.atomic_folder import (
    left_beside,
)
from turbogr.data.feature_columns import OWNERS, FeatureColumn, FeatureInfo
from turbogr.data.ranges import add_counts, cut_by_budget
from turbogr.data.vocabulary import Int64Array, Vocabulary
from turbogr.errors import UserError

SCHEMA_VERSION = 1
WITH_FEATURES = 2  # the version of a store with features, which releases that know none refuse
MANIFEST = "manifest.json"
ITEM_INFO = "item_info.parquet"  # optional, and no part of the content; see item_info.py
CHECKSUMS = "checksums.json"  # of all other files; stores of earlier releases have none
_LOGS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".jsonl": "jsonl"}  # sources by the ending of a file
_CHUNK_EVENTS = 1 << 20
_MOST_AT_ONCE = 1 << 30  # bytes; one read returns at most 2 GB


@dataclass(frozen=True)
class Column:
    """One .npy file of the store: its type, its length and the SHA-256 of its data."""

    dtype: str
    length: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store holds and how it was made; `manifest.json` on disk.

    `times` is "real" (seconds since 1970) or "positions" (the log had an order but no times). `split` is the default
    rule of `Split.of`. `account` maps "rows_in", "rows_kept" and "dropped" (reason -> number) to numbers of records. In
    a store that extends another, rows below `known_users` and `known_items` are those of the store whose content hash
    is `extends`. `settings` has the options of `prepare`, and under "plugin" the plug-in of the source, if any.
    `features` has what is known of every feature and action, by its key (see `turbogr.data.feature_columns`).
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
    features: dict[str, FeatureInfo] = field(default_factory=dict)
    content_hash: str = ""
    time_unit: str = "seconds"
    schema_version: int = SCHEMA_VERSION
    turbogr_version: str = ""

    def to_json(self) -> str:
        record = dataclasses.asdict(self)
        if self.features:
            record["schema_version"] = WITH_FEATURES
        else:
            del record["features"]
        return json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        raw = json.loads(text)
        raw["columns"] = {name: Column(**column) for name, column in raw["columns"].items()}
        raw["features"] = {key: FeatureInfo(**info) for key, info in raw.get("features", {}).items()}
        raw["schema_version"] = SCHEMA_VERSION
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
        features: key -> column of a feature, or of an action that is to be predicted.
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
        self.features: dict[str, FeatureColumn] = {
            key: _map_feature(path, key, info, self) for key, info in manifest.features.items()
        }

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
            # It was replaced meanwhile: some columns may be of the old store and some of the new one.

    @property
    def num_users(self) -> int:
        return self.manifest.num_users

    @property
    def num_items(self) -> int:
        return self.manifest.num_items

    @property
    def num_events(self) -> int:
        return self.manifest.num_events

    def feature_key(self, name: str) -> str | None:
        """Return the key that `name` stands for: a key, or the name of a single feature; None if it is neither.

        Raises:
            UserError: several features have this name.
        """
        if name in self.features:
            return name
        found = [f"{owner}.{name}" for owner in OWNERS if f"{owner}.{name}" in self.features]
        if len(found) > 1:
            raise UserError(f"{self.path} has several features '{name}': write {' or '.join(found)}")
        return found[0] if found else None

    @property
    def lengths(self) -> Int64Array:
        """Events per user, int64 [U]."""
        return np.diff(self.offsets)

    def user_blocks(self, max_events: int = _CHUNK_EVENTS) -> Iterator[tuple[int, int]]:
        """Yield (first, last + 1) of consecutive users that hold at most `max_events` events together (or one user)."""
        return pairwise(cut_by_budget(self.offsets, max_events).tolist())

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
    """Return what distinguishes the folder at `path` from one that replaces it, None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_range(column: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """Read column[start:stop] of a store into memory of its own.

    For passes over a whole column: every page of the mapped file that is read counts as memory of this process. It
    reads the file that was mapped, also where another store has its name by now.
    """
    assert isinstance(column, MappedColumn) and column.handle is not None, "a whole column of a store"
    values = np.empty(stop - start, column.dtype)
    data = memoryview(values.view(np.uint8))  # type: ignore[arg-type]
    position = column.offset + start * column.dtype.itemsize
    while len(data):
        read = os.preadv(column.handle, [data[:_MOST_AT_ONCE]], position)
        if not read:
            raise UserError(f"{column.filename} was cut short while it was read; prepare the store again")
        data, position = data[read:], position + read
    return values


class MappedColumn(np.memmap[Any, Any]):
    """A memory-mapped column with the open file that it maps, `handle`; what is cut out of it has None."""

    handle: int | None = None

    @classmethod
    def open(cls, file: Path) -> MappedColumn:
        """Map a .npy file of one dimension.

        Raises:
            ValueError, OSError: it is not one, or cannot be read.
        """
        with file.open("rb") as stream:
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError("not a file that a store has")
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            if dtype.hasobject or len(shape) != 1:
                raise ValueError("not a column of numbers")
            column = cls(stream, dtype, "r", stream.tell(), shape)  # type: ignore[arg-type]
            column.handle = os.dup(stream.fileno())
            weakref.finalize(column, os.close, column.handle)
        return column


def _preparing(path: Path) -> str:
    """Return the command that makes a store at `path`, or of `path` where it is a log rather than a folder."""
    if not path.is_file():
        return f"`turbogr prepare SOURCE PATH --out={path}`"
    source = _LOGS.get(path.suffix.lower(), "SOURCE")
    return f"`turbogr prepare {source} {path} --out=data/{path.stem}`"


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the store at `path` (see `Store.open` for what it raises)."""
    try:
        text = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a prepared store (it has no manifest.json)" if path.exists() else "does not exist"
        previous = left_beside(Path(os.path.realpath(path)))
        if previous is not None:
            raise UserError(
                f"{path} was being replaced when the process was killed; {previous} is the old store: rename it back "
                "or prepare again"
            ) from None
        raise UserError(f"{path} {what}; make one with {_preparing(path)}") from None
    try:
        raw = json.loads(text)
        version = raw["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / MANIFEST} is damaged; prepare the store again") from None
    if version not in (SCHEMA_VERSION, WITH_FEATURES):
        writer = raw.get("turbogr_version") or "another version"
        raise UserError(
            f"{path} has store version {version} (written by turbogr {writer}), but this turbogr reads "
            f"versions {SCHEMA_VERSION} and {WITH_FEATURES}; prepare the store again"
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
        array = MappedColumn.open(file)
    except FileNotFoundError:
        raise UserError(f"{file} is missing; prepare the store again") from None
    except (ValueError, EOFError, OSError):
        raise UserError(f"{file} is damaged or cut short; prepare the store again") from None
    if column is None or array.dtype.str != column.dtype or array.shape != (column.length,):
        raise UserError(f"{file} does not hold what the manifest says; prepare the store again")
    return array


def _map_vocabulary(path: Path, name: str, manifest: Manifest) -> Vocabulary:
    order = _map(path, f"{name}.order", manifest) if f"{name}.order" in manifest.columns else None
    where = str(path / name)
    if name in manifest.columns:
        return Vocabulary(_map(path, name, manifest), order, where)
    offsets, data = _map(path, f"{name}.offsets", manifest), _map(path, f"{name}.bytes", manifest)
    return Vocabulary.of_text(offsets, data, order, where)


def _map_feature(path: Path, key: str, info: FeatureInfo, store: Store) -> FeatureColumn:
    """Map the columns of a feature, or raise UserError where they do not fit the store."""
    manifest = store.manifest
    rows = {"item": store.num_items, "user": store.num_users}.get(key.partition(".")[0], store.num_events)
    values = _map(path, key, manifest)
    categories = info.kind in ("category", "categories")
    offsets = _map(path, f"{key}.offsets", manifest) if info.kind == "categories" else None
    vocabulary = _map_vocabulary(path, f"{key}.values", manifest) if categories else None
    whole = len(values) == (rows * info.size if info.kind == "vector" else rows)
    if offsets is not None:
        whole = len(offsets) == rows + 1 and offsets[0] == 0 and offsets[-1] == len(values)
    if not whole or (vocabulary is not None and len(vocabulary) != info.size):
        raise UserError(f"the columns of {path} do not fit its manifest; prepare the store again")
    return FeatureColumn(key, info, values, offsets, vocabulary)
