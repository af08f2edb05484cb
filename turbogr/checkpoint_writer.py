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
_PAGE_BYTES = 4096
_PAGES_AT_ONCE = 16_384  # touched by one thread, as so few elements are not worth several
_VISIBLE_SECONDS = 20.0  # in which a network file system shows other ranks' files
_POLL_SECONDS = 0.02
_END_SECONDS = 20.0  # that a run that fails waits for a save that is under way


class Copies:
    """Copies of tensors in host memory, in buffers that are used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None
        self._ended = threading.Event()
        self._noted = False

    def prepare(self, parts: Mapping[str, Rows]) -> None:
        """Make the buffers for copies of such parts in a thread, if there is memory: the system takes long to give it.

        Until then the first copy waits for them. The thread is not a daemon, which Python would stop inside PyTorch.
        """
        self.end_preparing()
        missing = [(name, part.rows) for name, part in self._missing(parts).items()]
        available = available_memory()
        if available is not None and sum(rows.nbytes for _, rows in missing) > _MOST_OF_MEMORY * available:
            return  # `of` looks again, and says so
        shapes = [(name, rows.shape, rows.dtype) for name, rows in missing]
        self._ended.clear()
        self._preparing = threading.Thread(target=self._prepare, args=(shapes,), name="checkpoint-buffers")
        self._preparing.start()

    def _prepare(self, shapes: Sequence[tuple[str, torch.Size, torch.dtype]]) -> None:
        for name, shape, dtype in shapes:
            try:
                buffer = torch.empty(shape, dtype=dtype)
            except RuntimeError:  # no memory; `of` tries again
                return
            if not self._touch(buffer):
                return
            self._buffers[name] = buffer

    def _touch(self, buffer: Tensor) -> bool:
        """Write to every page of a new buffer; False if it is no longer needed."""
        pages = buffer.view(-1).view(torch.uint8)[::_PAGE_BYTES] if buffer.numel() else buffer
        for start in range(0, len(pages) if buffer.numel() else 0, _PAGES_AT_ONCE):
            if self._ended.is_set():
                return False
            pages[start : start + _PAGES_AT_ONCE].zero_()
        return True

    def wait_until_prepared(self) -> None:
        """Wait for the thread of `prepare`, if there is one."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def end_preparing(self) -> None:
        """End the thread of `prepare`; buffers that are made already stay."""
        self._ended.set()
        self.wait_until_prepared()

    def of(self, parts: Mapping[str, Rows]) -> dict[str, Rows] | None:
        """Return copies of the parts that training still changes; None where there is no memory for them."""
        self.wait_until_prepared()
        needed = sum(part.rows.nbytes for part in self._missing(parts).values())
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
        buffers, self._buffers = self._buffers, {}
        for name, part in parts.items():
            if part.is_copy:
                continue
            rows = part.rows.detach()
            target = buffers[name] if _fits(buffers.get(name), rows) else torch.empty(rows.shape, dtype=rows.dtype)
            self._buffers[name] = target.copy_(rows)
            copies[name] = dataclasses.replace(part, rows=target, is_copy=True)
        return copies

    def _missing(self, parts: Mapping[str, Rows]) -> dict[str, Rows]:
        """The parts to be copied that have no buffer yet."""
        return {
            name: part
            for name, part in parts.items()
            if not part.is_copy and not _fits(self._buffers.get(name), part.rows)
        }


def _fits(buffer: Tensor | None, rows: Tensor) -> bool:
    return buffer is not None and buffer.shape == rows.shape and buffer.dtype == rows.dtype


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
