"""Atomic writing: a reader sees the old content of a file or the new one, never a part of it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turbogr.errors import UserError


def check_writable(path: Path | str, option: str) -> None:
    """Check, before long work, that a file can be written at `path`; `option` is where the path was given.

    A symbolic link is followed, as by `atomic_file`.

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


def replace_text(path: Path | str, text: str) -> None:
    """Write `text` (UTF-8) to a temporary file and rename that to `path`; a failure changes nothing.

    A symbolic link is followed, as by `atomic_file`.

    Raises:
        UserError: `path` is a pipe, a device or a socket.
        OSError: `path` is a folder, its folder does not exist or cannot be written, or the disk is full.
    """
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Yield an empty temporary file beside `path` to write to; rename it to `path` at the end of the `with` block.

    If the block raises, `path` is unchanged and the temporary file is removed. A symbolic link stays a link; the file
    that it points to is replaced.

    Raises:
        UserError: `path` is a pipe, a device or a socket, which a rename would turn into a regular file.
        OSError: `path` is a folder, its folder does not exist or cannot be written, or the disk is full; it names
            `path`.
    """
    path = Path(path)
    _refuse_special(path, str(path))
    target = _link_target(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        error.filename = str(path)
        raise
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        handle = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private; ours get the usual permissions
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (temporary, name):  # name the file that the user knows
            error.filename = str(path)
        raise


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
