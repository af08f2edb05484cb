"""Save tensors to a folder and load them, with PyTorch's distributed checkpoint (DCP).

DCP's format does not depend on how many processes wrote it, so a checkpoint can be loaded on any number of ranks.
Sharded tables are passed as DTensors (`ShardedTable.for_checkpoint`); plain tensors are equal on all ranks and written
once.
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
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turbogr.errors import UserError
from turbogr.parallel.world import communicating

_PROBE_BYTES = 1 << 20
_REMEDY = "It is damaged or belongs to another model; remove the folder to use an earlier one"


def save_tensors(state: dict[str, Any], folder: Path) -> None:
    """Write nested dicts of tensors into the new folder `folder` and flush to disk; with many ranks, all call it.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            with communicating("checkpoint") if _has_many_ranks() else nullcontext():
                save(state, storage_writer=FileSystemWriter(folder, overwrite=False), no_dist=not _has_many_ranks())
    except CheckpointException as error:
        raise _os_error(error, folder) from error


def load_tensors(state: dict[str, Any], folder: Path) -> None:
    """Load into the tensors of `state`, in place; `state` may be a part of what was saved.

    Raises:
        UserError: a tensor is missing in the folder, or the folder is damaged.
    """
    if missing := missing_files(folder):
        raise UserError(
            f"{', '.join(missing)} is missing in the checkpoint {folder}: it was removed, or a rank has written it to "
            f"another machine's disk. Copy it here, or remove the folder to use an earlier checkpoint"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the checkpoint {folder}: {reason}. {_REMEDY}") from error


def stored_names(folder: Path) -> set[str]:
    """Return the names of the tensors in the checkpoint in `folder`.

    Raises:
        UserError: the folder has no list of its tensors, or a damaged one.
    """
    return set(_read_metadata(folder).state_dict_metadata)


def missing_files(folder: Path) -> list[str]:
    """Return the names of the tensor files that are missing in the checkpoint in `folder`, sorted.

    Raises:
        UserError: the folder has no `.metadata` file, or a damaged one.
    """
    metadata = _read_metadata(folder)
    names = {entry.relative_path for entry in metadata.storage_data.values()}
    return sorted(name for name in names if not (folder / name).exists())


def _read_metadata(folder: Path) -> Metadata:
    try:
        return FileSystemReader(folder).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise UserError(f"cannot read {folder / '.metadata'}: {error}. {_REMEDY}") from error


def _has_many_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _os_error(error: CheckpointException, folder: Path) -> OSError:
    """Return the OSError behind DCP's exception. torch's writer hides a full disk, so try a write if there is none."""
    for failure in error.failures.values():
        cause: BaseException | None = failure[0] if isinstance(failure, tuple) else failure
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno is not None:
                return OSError(cause.errno, cause.strerror, str(folder))
            cause = cause.__cause__ or cause.__context__
    return _try_write(folder) or OSError(errno.EIO, " ".join(str(error).split())[:300], str(folder))


def _try_write(folder: Path) -> OSError | None:
    """Try to write a small file into `folder`; return the error, None if it works."""

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
