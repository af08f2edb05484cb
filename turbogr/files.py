"""Writing a file so that a reader sees the old content or the new one, never half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_text(path: Path | str, text: str) -> None:
    """Write `text` (UTF-8) aside and rename it to `path`; on any failure `path` is as it was and nothing else remains.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.
    """
    path = Path(path)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~_umask())  # mkstemp makes private files; results are as readable as any other file
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
