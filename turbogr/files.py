"""Atomic writing: a reader sees the old content of a file or the new one, never a part of it.

A file is written beside its target as `.NAME.RANDOM.part` and renamed. Its writer holds a lock on it, so that what a
killed process has left is not confused with what a running one writes (`remove_abandoned_files`).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from turbogr.errors import UserError
from turbogr.file_locks import is_at, try_lock

_TEMPORARY = re.compile(r"\..+\.[0-9a-z_]{8}\.part")  # letters and _: names of release 0.1
_OF_THE_TARGET = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a failed write, which names no file
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # a file system that does not flush folders


def check_writable(path: Path | str, option: str) -> None:
    """Check, before long work, that a file can be written at `path`; `option` is where the path was given.

    A symbolic link is followed, as by `atomic_file` with `follow_link`.

    Raises:
        UserError: `path` is a folder, a pipe, a device or a socket, or its folder does not exist or cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file in it")
    _refuse_special(path, f"{option} {path}")
    folder = _link_target(path).parent
    if not folder.is_dir():
        raise UserError(f"{option} {path}: the folder {folder} does not exist; create it or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option} {path}: the folder {folder} is not writable; change its permissions or name another")


def replace_text(path: Path | str, text: str, *, follow_link: bool = False) -> None:
    """Write `text` (UTF-8) to a temporary file and rename that to `path`; a failure changes nothing.

    A symbolic link is treated as by `atomic_file`.

    Raises:
        UserError: `path` is a pipe, a device or a socket.
        OSError: `path` is a folder, its folder does not exist or cannot be written, or the disk is full.
    """
    with atomic_file(path, follow_link=follow_link) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def atomic_file(path: Path | str, *, follow_link: bool = False) -> Iterator[Path]:
    """Yield an empty temporary file beside `path` to write to; rename it to `path` at the end of the `with` block.

    If the block raises, `path` is unchanged and the temporary file is removed. A symbolic link is replaced by the file:
    a run folder from somebody else may hold links to files of ours. With `follow_link`, for a path that the user has
    named, the link stays and the file that it points to is replaced.

    Raises:
        UserError: `path` is a pipe, a device or a socket, which a rename would turn into a regular file.
        OSError: `path` is a folder, its folder does not exist or cannot be written, or the disk is full; it names
            `path`.
    """
    path = Path(path)
    if follow_link or not path.is_symlink():
        _refuse_special(path, str(path))
    target = _link_target(path) if follow_link else path
    try:
        temporary, handle = _make_beside(target)
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        yield temporary
        os.fsync(handle)
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and _names_temporary(error, temporary):  # name the file that the user knows
            error.filename = str(path)
        raise
    finally:
        os.close(handle)


def no_link(path: str, flags: int) -> int:
    """The `opener` of a file that a run folder has for itself: a link in a folder from somebody else is not followed.

    Raises:
        UserError: `path` is a symbolic link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                f"{path} is a symbolic link, which is not followed here; put the file in its place"
            ) from error
        raise


def remove_abandoned_files(folder: Path) -> None:
    """Remove the temporary files that killed writers left in `folder`, if there is such a folder.

    Where the file system has no locks, nothing is removed: a running process may write it.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if _TEMPORARY.fullmatch(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        with suppress(OSError):  # its writer has renamed it, or it is not ours
            handle = os.open(entry, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(handle).st_mode) and try_lock(handle) and is_at(handle, entry):
                    entry.unlink()
            finally:
                os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, so that a rename outlasts a power cut, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def _make_beside(target: Path) -> tuple[Path, int]:
    """Make an empty temporary file beside `target`; return it with an open handle that locks it.

    Its permissions are those of any new file. The system applies the umask, which a process with threads cannot read.
    """
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Before the lock was taken, another process may have found the file unlocked and removed it.
        if try_lock(handle) is not False and is_at(handle, temporary):
            return temporary, handle
        os.close(handle)


def _names_temporary(error: OSError, temporary: Path) -> bool:
    """Whether an error is about the temporary file, by name or because a write has failed."""
    if error.filename is None:
        return error.errno in _OF_THE_TARGET
    return error.filename in (temporary, str(temporary))


def _link_target(path: Path) -> Path:
    """Return where a symbolic link points, which need not exist; any other path unchanged."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _refuse_special(path: Path, name: str) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{name} is a link to itself; remove it or name another file") from error
        return  # the file does not exist, or its folder is checked where it is used

    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise UserError(f"{name} is {kind} and cannot be replaced by a file; name a regular file or a new one")
