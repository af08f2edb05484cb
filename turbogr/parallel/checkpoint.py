"""Tensors to a folder and back, through PyTorch's distributed checkpoint (DCP).

DCP's format does not depend on how many processes wrote it, so a checkpoint outlives the size of the job.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turbogr.errors import UserError


def save_tensors(state: dict[str, Any], folder: Path) -> None:
    """Write nested dicts of tensors into the new folder `folder`, flushed to disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            save(state, storage_writer=FileSystemWriter(folder, overwrite=False), no_dist=True)
    except CheckpointException as error:
        raise _os_error(error) from error


def load_tensors(state: dict[str, Any], folder: Path) -> None:
    """Read into the tensors of `state`, in place; they may be a part of what was saved.

    Raises:
        UserError: the folder lacks a tensor or is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot read the checkpoint {folder}: {reason}. It is damaged or belongs to another model; "
            "remove the folder to fall back to an earlier one"
        ) from error


def _os_error(error: CheckpointException) -> OSError:
    """DCP wraps what a writer thread raised; the cause is what a user can act on."""
    for failure in error.failures.values():
        cause = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(cause, OSError):
            return cause
    return OSError(str(error))
