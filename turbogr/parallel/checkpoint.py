"""Tensors to a folder and back, through PyTorch's distributed checkpoint (DCP).

DCP's format does not depend on how many processes wrote it, so a checkpoint outlives the size of the job. Tables of
many ranks come as DTensors (`ShardedTable.for_checkpoint`); plain tensors are the same on all ranks and written once.
"""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turbogr.errors import UserError
from turbogr.parallel.world import contact

_PROBE_BYTES = 1 << 20
_FALL_BACK = "It is damaged or belongs to another model; remove the folder to fall back to an earlier one"


def save_tensors(state: dict[str, Any], folder: Path) -> None:
    """Write nested dicts of tensors into the new folder `folder`, flushed to disk; with many ranks, all call it.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            with contact("checkpoint") if _many() else nullcontext():
                save(state, storage_writer=FileSystemWriter(folder, overwrite=False), no_dist=not _many())
    except CheckpointException as error:
        raise _os_error(error, folder) from error


def load_tensors(state: dict[str, Any], folder: Path) -> None:
    """Read into the tensors of `state`, in place; they may be a part of what was saved.

    Raises:
        UserError: the folder lacks a tensor or is damaged.
    """
    if missing := missing_files(folder):
        raise UserError(
            f"the checkpoint {folder} lacks {', '.join(missing)}: it was removed, or a rank has written it to another "
            f"machine's disk. Bring it here, or remove the folder to fall back to an earlier one"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the checkpoint {folder}: {reason}. {_FALL_BACK}") from error


def missing_files(folder: Path) -> list[str]:
    """Return the files of tensors that the checkpoint in `folder` should have and has not, sorted.

    Raises:
        UserError: the folder has no list of its files, or a damaged one.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise UserError(f"cannot read {folder / '.metadata'}: {error}. {_FALL_BACK}") from error
    names = {place.relative_path for place in metadata.storage_data.values()}
    return sorted(name for name in names if not (folder / name).exists())


def _many() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _os_error(error: CheckpointException, folder: Path) -> OSError:
    """DCP wraps what a writer raised, and torch's writer hides a full disk; return what a user can act on."""
    for failure in error.failures.values():
        cause: BaseException | None = failure[0] if isinstance(failure, tuple) else failure
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno is not None:
                return OSError(cause.errno, cause.strerror, str(folder))
            cause = cause.__cause__ or cause.__context__
    return _write_fault(folder) or OSError(errno.EIO, " ".join(str(error).split())[:300], str(folder))


def _write_fault(folder: Path) -> OSError | None:
    """Try to write a little into `folder`; return what the system says against it."""
    probe = folder / ".probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        return OSError(fault.errno, fault.strerror, str(folder))
    finally:
        probe.unlink(missing_ok=True)
    return None
