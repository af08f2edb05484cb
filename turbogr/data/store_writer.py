"""Writing a store: columns that grow in a folder beside the target, which is renamed into place at the end.

So a reader never sees half a store, and a writer that fails leaves the target as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from turbogr import __version__
from turbogr.checksums import BLOCK, FileChecksum
from turbogr.data.atomic_folder import make_beside, move_into_free_place, move_into_place, remove_abandoned, restore
from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.store import CHECKSUMS, ITEM_INFO, MANIFEST, Column, Manifest, Store
from turbogr.data.store_checksums import write_checksums
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError
from turbogr.files import sync_folder


class ColumnFile:
    """A .npy file that grows; its header is written when it is closed. `checksum` is that of the file, once closed."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.length = 0
        self._hash = hashlib.sha256()
        self.checksum = FileChecksum()
        self._file: IO[bytes] = open(path, "w+b")  # noqa: SIM115 - lives as long as the object
        self._write_header()

    def _write_header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        if not self.checksum.num_bytes:  # what the header will be is known at the end
            self.checksum.update(memoryview(bytes(self._file.tell())))

    def append(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, self.dtype)
        self._hash.update(data.data)
        self.checksum.update(data.data.cast("B") if len(data) else memoryview(b""))
        self._file.write(data.data)
        self.length += len(data)

    def close(self) -> Column:
        """Write the header, flush to the disk and return the column's entry of the manifest."""
        end = self._file.tell()
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() + self.length * self.dtype.itemsize == end, "the header must not change its size"
        self._file.flush()
        self._file.seek(0)
        self.checksum.replace_first_block(self._file.read(BLOCK))
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
            _refuse_other_folders(self.target)
        missing = takewhile(lambda folder: not folder.exists(), self.target.parents)
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

    def write_feature(self, column: FeatureColumn) -> None:
        """Write the columns of a feature; its `info` belongs into the manifest, under its key."""
        self.append(column.key, np.asarray(column.values).reshape(-1))
        if column.offsets is not None:
            self.append(f"{column.key}.offsets", column.offsets, np.int64)
        if column.vocabulary is not None:
            self.write_vocabulary(f"{column.key}.values", column.vocabulary.ids, column.vocabulary.order)

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
        checksums = {f"{name}.npy": self._columns[name].checksum for name in columns}
        write_checksums(self.folder, {MANIFEST: FileChecksum.of(self.folder / MANIFEST), **checksums})
        os.fsync(self._lock)
        self._move_into_place()
        self._close()
        return Store.open(self.target)

    def _move_into_place(self) -> None:
        """Rename the folder to the target; what has appeared there since the start is as safe as before it."""
        replaced = None
        if self._overwrite:
            if os.path.lexists(self.target):
                _refuse_other_folders(self.target)
            replaced = move_into_place(self.folder, self.target)
        elif not move_into_free_place(self.folder, self.target):
            raise UserError(
                f"{self.target} appeared while its data was prepared and is left as it is; choose another --out or "
                "pass --overwrite"
            )
        sync_folder(self.target.parent)
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


def _refuse_other_folders(target: Path) -> None:
    """Raise UserError unless `target` is an empty folder, or a store of any version with nothing else in it."""
    refusal = f"{target} is not a prepared store, so it is not overwritten; choose another --out or remove it yourself"
    if target.is_dir() and not any(target.iterdir()):
        return
    try:
        raw = json.loads((target / MANIFEST).read_bytes())
        named = {MANIFEST, CHECKSUMS, ITEM_INFO, *(f"{name}.npy" for name in raw["columns"])}
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
    features = [f"{key} {dataclasses.asdict(info)}" for key, info in sorted(manifest.features.items())]
    text = "\n".join([*lines, manifest.split, manifest.times, *features])
    return hashlib.sha256(text.encode()).hexdigest()
