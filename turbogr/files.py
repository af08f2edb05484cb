"""Writing a file so that a reader sees the old content or the new one, never half of it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turbogr.errors import UserError


def check_target(path: Path | str, place: str) -> None:
    """Check, before long work, that a file can be written at `path`; `place` is where the path came from.

    A link is followed, as `replacing` does.

    Raises:
        UserError: `path` is a folder, a pipe, a device or a socket, or its folder does not exist or cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{place} {path} is a folder; name a file in it")
    _refuse_special(path, f"{place} {path}")
    folder = _followed(path).parent
    if not folder.is_dir():
        raise UserError(f"{place} {path}: the folder {folder} does not exist; make it or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{place} {path}: the folder {folder} is not writable; change its rights or name another")


def replace_text(path: Path | str, text: str) -> None:
    """Write `text` (UTF-8) aside and rename it to `path`; on any failure `path` is as it was and nothing else remains.

    A link is followed, as `replacing` does.

    Raises:
        UserError: `path` is a pipe, a device or a socket.
        OSError: `path` is a folder, its folder does not exist or cannot be written, or the disk is full.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield an empty file beside `path` to be written, and rename it to `path` at the end of the `with` block.

    If the block raises, `path` is as it was and nothing else remains. A link stays, and what it leads to is replaced.

    Raises:
        UserError: `path` is a pipe, a device or a socket, which a rename would turn into a regular file.
        OSError: `path` is a folder, its folder does not exist or cannot be written, or the disk is full; it names
            `path`.
    """
    path = Path(path)
    _refuse_special(path, str(path))
    target = _followed(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        error.filename = str(path)
        raise
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        handle = os.open(aside, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.chmod(aside, 0o666 & ~_umask())  # mkstemp makes private files; results are as readable as any other file
        os.replace(aside, target)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (aside, name):  # users have never heard of that file
            error.filename = str(path)
        raise


def _followed(path: Path) -> Path:
    """What a link leads to, which need not exist; any other path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _refuse_special(path: Path, name: str) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{name} is a link that leads to itself; remove it or name another file") from error
        return  # nothing is there, or what is wrong with the folder is told where it is used
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise UserError(f"{name} is {kind} and cannot be replaced by a file; name a regular file or a new one")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
