"""Replacing a folder by another so that its name always refers to the old one or the new one.

Linux and macOS can swap two names atomically. On a file system that cannot (some network ones), nothing has the name
for a moment between two renames; the old folder is then beside it as `.NAME.previous-*`, and `restore` puts it back if
a process was killed in that moment. A writer holds a lock on its folder as long as it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from turbogr.file_locks import is_at, try_lock

_AT_CWD, _SWAP = -100, 2  # arguments of renameat2 (Linux) and renamex_np (macOS); 2 means swapping in both


def make_beside(target: Path) -> tuple[Path, int]:
    """Make an empty folder beside `target` and return it with an open handle that locks it.

    Raises:
        OSError: nothing can be written there.
    """
    while True:
        folder = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        os.mkdir(folder)  # with the usual permissions, as the system applies the umask
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            # Before the lock was taken, another writer may have found the folder unlocked and removed it.
            if try_lock(handle) is not False and is_at(handle, folder):
                return folder, handle
            os.close(handle)


def remove_abandoned(target: Path) -> None:
    """Remove the folders that killed writers of `target` left beside it."""
    for folder in _unlocked(target, "partial"):
        shutil.rmtree(folder, ignore_errors=True)


def move_into_free_place(folder: Path, target: Path) -> bool:
    """Rename `folder` to `target`; return False where something has that name already, which is left as it is."""
    try:
        os.rename(folder, target)  # replaces nothing but an empty folder
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def move_into_place(folder: Path, target: Path) -> Path | None:
    """Rename `folder` to `target` and return where the replaced folder now is, None if there was none."""
    if not os.path.lexists(target):
        os.rename(folder, target)
        return None
    if _exchange(folder, target):
        return folder
    previous = target.with_name(f".{target.name}.previous-{secrets.token_hex(4)}")
    try:
        handle = os.open(target, os.O_RDONLY)
    except FileNotFoundError:  # another writer is between its two renames
        return move_into_place(folder, target)
    try:
        try_lock(handle)
        os.rename(target, previous)
        try:
            os.rename(folder, target)
        except BaseException:
            if not os.path.lexists(target):
                os.rename(previous, target)
            raise
    finally:
        os.close(handle)
    return previous


def restore(target: Path) -> None:
    """Put back the old `target` if a process was killed between the two renames; remove it if both were done."""
    for folder in _unlocked(target, "previous"):
        if os.path.lexists(target):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            os.rename(folder, target)


def left_beside(target: Path) -> Path | None:
    """Return the folder that `restore` would put back, None if there is none."""
    return None if os.path.lexists(target) else next(_unlocked(target, "previous"), None)


def _unlocked(target: Path, kind: str) -> Iterator[Path]:
    """Yield the folders of a kind beside `target` whose writers have ended, each locked while it is used."""
    for name in sorted(glob.glob(f".{glob.escape(target.name)}.{kind}-*", root_dir=target.parent)):
        folder = target.parent / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if try_lock(handle):
                    yield folder
            finally:
                os.close(handle)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; return whether the system and the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform.startswith("linux") and hasattr(libc, "renameat2"):
        return bool(libc.renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _SWAP) == 0)
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        return bool(libc.renamex_np(*names, _SWAP) == 0)
    return False
