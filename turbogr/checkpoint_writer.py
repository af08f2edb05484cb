"""Writing one checkpoint while training goes on: copies of the tensors, and a thread on every rank that writes them.

Each rank writes its part into a folder aside, in a thread of its own. Rank 0's thread waits until all parts are there,
which it sees in the shared folder, and publishes the checkpoint. So these threads send no messages while training sends
its own. A kill at any moment leaves the earlier checkpoints as they are; the next start removes the folder aside.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from turbogr.errors import Note, UserError, warn_caller
from turbogr.files import replace_text, sync_folder
from turbogr.machine import available_memory
from turbogr.parallel.tensor_files import Rows, missing_parts, write_part

_MOST_OF_MEMORY = 0.8  # of what is available, for copies
_VISIBLE_SECONDS = 20.0  # in which a network file system shows other ranks' files
_POLL_SECONDS = 0.02
_END_SECONDS = 20.0  # that a run that fails waits for a save that is under way


class Copies:
    """Copies of tensors in host memory, in buffers that are used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._noted = False

    def of(self, parts: Mapping[str, Rows]) -> dict[str, Rows] | None:
        """Return copies of the parts that training still changes; None where there is no memory for them."""
        buffers = {name: self._buffer(name, part.rows) for name, part in parts.items() if not part.is_copy}
        missing = [name for name, buffer in buffers.items() if buffer is None]
        needed = sum(parts[name].rows.nbytes for name in missing)
        available = available_memory()
        if available is not None and needed > _MOST_OF_MEMORY * available:
            if not self._noted:
                self._noted = True
                warn_caller(
                    f"checkpoints are written while training waits: a copy of {needed / 1e9:,.1f} GB does not fit into "
                    f"the {available / 1e9:,.1f} GB of free memory",
                    Note,
                )
            return None
        copies = dict(parts)
        self._buffers = {}
        for name, buffer in buffers.items():
            rows = parts[name].rows.detach()
            target = torch.empty(rows.shape, dtype=rows.dtype) if buffer is None else buffer
            self._buffers[name] = target.copy_(rows)
            copies[name] = dataclasses.replace(parts[name], rows=target, is_copy=True)
        return copies

    def _buffer(self, name: str, rows: Tensor) -> Tensor | None:
        buffer = self._buffers.get(name)
        return buffer if buffer is not None and buffer.shape == rows.shape and buffer.dtype == rows.dtype else None


class PendingSave:
    """One checkpoint on its way to `final`: this rank writes its `parts` to `aside`, as part number `writer`.

    On rank 0, `publish` makes the checkpoint of the parts once all are there.
    """

    def __init__(
        self,
        parts: Mapping[str, Rows],
        aside: Path,
        final: Path,
        *,
        writer: int | None,
        num_writers: int,
        publish: Callable[[], None] | None,
    ) -> None:
        self.final, self._aside, self._num_writers = final, aside, num_writers
        self._writer, self._publish = writer, publish
        self._parts: Mapping[str, Rows] | None = parts
        self.written = threading.Event()
        """Set when this rank's part is on the disk, or has failed."""
        self._deadline: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def _run(self) -> None:
        try:
            try:
                if self._writer is not None:
                    assert self._parts is not None
                    write_part(in_host_memory(self._parts), self._aside, self._writer, self._num_writers)
            finally:
                self._parts = None
        except BaseException as error:
            self._error = error
        self.written.set()
        if self._publish is not None and self._error is None:
            try:
                self._wait_for_parts()
                self._publish()
            except BaseException as error:
                self._error = error

    def _wait_for_parts(self) -> None:
        while missing := missing_parts(self._aside, self._num_writers):
            if self._deadline is not None and time.monotonic() >= self._deadline:
                path = self._aside / missing[0]
                raise OSError(errno.ENOENT, "a rank wrote its part of the checkpoint elsewhere", path)
            time.sleep(_POLL_SECONDS)

    def end(self, seconds: float | None = None, longest: float | None = None) -> None:
        """Wait until the checkpoint is published, at most `longest` seconds.

        All ranks have written theirs; parts that are not seen within `seconds` are lost.
        """
        self._deadline = time.monotonic() + (_VISIBLE_SECONDS if seconds is None else seconds)
        self._thread.join(longest)

    def abandon(self) -> None:
        """End without other ranks, one of which may be gone: what all have written already still counts."""
        self.end(0.0 if self.written.is_set() else 1.0, longest=_END_SECONDS)

    def check(self) -> None:
        """Raise the error of writing or publishing, if there was one.

        Raises:
            UserError: the disk is full.
            OSError: it cannot be written for another reason; it names a path in the checkpoint's own folder.
        """
        if isinstance(self._error, OSError):
            raise about_checkpoint(self._error, self._aside, self.final) from self._error
        if self._error is not None:
            raise self._error

    def clean(self) -> None:
        """Remove what was written of a checkpoint that could not be published."""
        shutil.rmtree(self._aside, ignore_errors=True)


def in_host_memory(parts: Mapping[str, Rows]) -> dict[str, Rows]:
    return {name: dataclasses.replace(part, rows=part.rows.detach().cpu()) for name, part in parts.items()}


def publish_folder(aside: Path, final: Path, progress: str) -> None:
    """Add progress.json to a folder with all parts, rename it, and flush its name to the disk."""
    replace_text(aside / "progress.json", progress)
    sync_folder(aside)
    os.rename(aside, final)
    sync_folder(final.parent.parent)
    sync_folder(final.parent)


def about_checkpoint(error: OSError, aside: Path, final: Path) -> Exception:
    """Return an error of writing a checkpoint in terms of `final`, the folder that the user knows, not of `aside`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "disk is full" if error.errno == errno.ENOSPC else "disk quota is used up"
        return UserError(
            f"the checkpoint {final} could not be written, because the {what}; earlier checkpoints are kept. Free some "
            "space and continue with --resume; a smaller train.keep_checkpoints needs less"
        )
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    if path is None or not path.is_relative_to(aside):
        return error
    return OSError(error.errno, error.strerror, str(final / path.relative_to(aside)))


def agreed_writers(everyone: Sequence[bool], rank: int) -> tuple[int | None, int]:
    """Return the number of a rank's part, None if it writes none, and how many parts there are."""
    writers = [other for other, writes in enumerate(everyone) if writes]
    return (writers.index(rank) if rank in writers else None), len(writers)
