"""A copy of a store inside another folder, and the check that a store's columns are what its manifest says.

A run keeps such a copy, so that it can recommend after the original was moved or removed. Files are hard links where
the file system allows: a store is never changed in place, so many runs on the same data cost its size once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np

from turbogr.data.atomic_folder import make_beside, move_into_place, remove_abandoned, restore
from turbogr.data.store import CHECKSUMS, ITEM_INFO, MANIFEST, Store, read_manifest
from turbogr.errors import UserError

_CHUNK_BYTES = 1 << 22


def store_files(store: Store) -> list[Path]:
    """Return the files of a store: manifest, columns, checksums, and what is known of the items."""
    names = [MANIFEST, *(f"{name}.npy" for name in store.manifest.columns)]
    names += [name for name in (CHECKSUMS, ITEM_INFO) if (store.path / name).exists()]
    return [store.path / name for name in names]


def store_bytes(store: Store) -> int:
    """Return how large the files of a store are together."""
    return sum(file.stat().st_size for file in store_files(store))


def copy_store(store: Store, target: Path) -> None:
    """Make `target` a copy of a store; readers of `target` see the old copy or the new one.

    Raises:
        UserError: the store was replaced by other data since it was opened.
        OSError: it cannot be written.
    """
    restore(target)
    remove_abandoned(target)
    folder, lock = make_beside(target)
    replaced: Path | None = folder
    try:
        for file in store_files(store):
            _link_or_copy(file, folder / file.name)
        if read_manifest(folder).content_hash != store.manifest.content_hash:
            raise UserError(f"{store.path} was replaced by other data meanwhile and is not copied to {target}")
        os.chmod(folder, target.parent.stat().st_mode & 0o777)
        replaced = move_into_place(folder, target)
    finally:
        os.close(lock)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)


def check_content(store: Store) -> None:
    """Read all columns of a store and compare them with its manifest.

    Raises:
        UserError: a column does not hold what was written.
    """
    for name, column in store.manifest.columns.items():
        file = store.path / f"{name}.npy"
        if _data_hash(file, column.length, column.dtype) != column.sha256:
            raise UserError(f"{file} is damaged: its content is not what was written; copy the folder again")


def _data_hash(file: Path, length: int, dtype: str) -> str:
    """SHA-256 of the data of a .npy file, which is at its end, behind the header."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(-length * np.dtype(dtype).itemsize, os.SEEK_END)
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
