"""What a run writes and shows while it trains: metrics.jsonl, TensorBoard and the progress bar."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from tqdm import tqdm

from turbogr.files import no_link


class _Writer(Protocol):
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def close(self) -> None: ...


class SilentTracker:
    """The tracker of a rank that neither writes nor shows; `record` returns 0."""

    def record(self, kind: str, step: int, values: dict[str, Any]) -> int:
        return 0

    def sync(self) -> None: ...

    def advance(self) -> None: ...

    def show(self, **values: str) -> None: ...

    def say(self, line: str) -> None: ...

    def __enter__(self) -> SilentTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Tracker:
    """Appends records to metrics.jsonl from byte `metrics_bytes` on; what a killed run wrote after that is dropped."""

    def __init__(self, run: Path, *, metrics_bytes: int, step: int, num_steps: int, tensorboard: bool) -> None:
        self._file = _open_at(run / "metrics.jsonl", metrics_bytes)
        self._board = _tensorboard(run / "tensorboard", step) if tensorboard else None
        self._bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True, disable=None, smoothing=0.1)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> int:
        """Write one record and return the length of metrics.jsonl after it."""
        line = json.dumps({"kind": kind, "step": step, **values}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            prefix = f"{kind}/{values['part']}" if "part" in values else kind
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{prefix}/{name}", value, step)
        return self._file.tell()

    def sync(self) -> None:
        """Put metrics.jsonl on the disk, so that a checkpoint never remembers more of it than there is."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def advance(self) -> None:
        self._bar.update()

    def show(self, **values: str) -> None:
        """Put values beside the progress bar."""
        self._bar.set_postfix(values, refresh=False)

    def say(self, line: str) -> None:
        """Print a line without breaking the progress bar."""
        self._bar.clear()
        print(line, file=sys.stderr, flush=True)
        self._bar.refresh()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        self.sync()
        self._file.close()
        if self._board is not None:
            self._board.close()


def _open_at(path: Path, length: int) -> IO[bytes]:
    """Open for appending after the first `length` bytes; a shorter file keeps its whole lines, with a warning."""
    content = path.read_bytes()[:length] if path.exists() else b""
    if len(content) < length:
        warnings.warn(f"{path} is shorter than the checkpoint remembers; the records cut off are lost", stacklevel=4)
        content = content[: content.rfind(b"\n") + 1]
    file = open(path, "ab", opener=no_link)  # noqa: SIM115 - it is open as long as the run
    file.truncate(len(content))
    return file


def _tensorboard(folder: Path, step: int) -> _Writer | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn(
            "TensorBoard is not installed (pip install 'turbogr[tensorboard]'); metrics.jsonl has it all", stacklevel=3
        )
        return None
    writer: _Writer = SummaryWriter(str(folder), purge_step=step + 1)
    return writer
