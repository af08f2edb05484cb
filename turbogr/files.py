"""Writing a file so that a reader sees the old content or the new one, never half of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turbogr.errors import UserError


def check_target(path: Path | str, place: str) -> None:
    """Check, before long work, that a file can be written at `path`; `place` is where the path came from.

    Raises:
        UserError: `path` is a folder, or its folder does not exist or cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{place} {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"{place} {path}: the folder {path.parent} does not exist; make it or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{place} {path}: the folder {path.parent} is not writable; change its rights or name another")


def replace_text(path: Path | str, text: str) -> None:
    """Write `text` (UTF-8) aside and rename it to `path`; on any failure `path` is as it was and nothing else remains.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield an empty file beside `path` to be written, and rename it to `path` at the end of the `with` block.

    If the block raises, `path` is as it was and nothing else remains.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full; it names `path`.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
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
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (aside, name):  # users have never heard of that file
            error.filename = str(path)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
