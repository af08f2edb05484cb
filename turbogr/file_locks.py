"""Locks on open files and folders: they end with the process that holds them, however it ends.

Not every file system has them. NFS locks a file that is open for writing, but no folder; some others lock nothing.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(handle: int) -> bool | None:
    """Lock an open file or folder; return False if another process has it, None if the file system cannot lock it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file or folder still has the name `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
