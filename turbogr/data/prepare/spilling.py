"""Temporary columns on disk: appended block by block, read back by range; plain reads, so they cost no memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Spill:
    """Columns of equal length in a folder, one raw file each; written by one thread, readable by many."""

    def __init__(self, folder: Path, name: str, columns: Mapping[str, DTypeLike]) -> None:
        self.length = 0
        self._dtypes = {column: np.dtype(dtype) for column, dtype in columns.items()}
        self._paths = {column: folder / f"{name}.{number}" for number, column in enumerate(columns)}
        self._files = {
            column: os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for column, path in self._paths.items()
        }

    def append(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append values to every column, equally many to each."""
        lengths = {len(columns[column]) for column in self._dtypes}
        assert len(lengths) == 1, "columns must have the same length"
        for column, dtype in self._dtypes.items():
            data = np.ascontiguousarray(columns[column], dtype).data.cast("B")
            while data:
                data = data[os.write(self._files[column], data) :]
        self.length += lengths.pop()

    def dtype(self, column: str) -> np.dtype[Any]:
        return self._dtypes[column]

    def read(self, column: str, start: int, stop: int) -> NDArray[Any]:
        """Return the values start:stop of a column."""
        out = np.empty(stop - start, self._dtypes[column])
        self.read_into(column, start, out)
        return out

    def read_into(self, column: str, start: int, out: NDArray[Any]) -> None:
        """Fill the contiguous array `out` with the values from `start` on."""
        dtype = self._dtypes[column]
        view = out.data.cast("B")
        done = 0
        while done < len(view):
            count = os.preadv(self._files[column], [view[done:]], start * dtype.itemsize + done)
            assert count > 0, "read beyond the end of a spill"
            done += count

    @property
    def columns(self) -> list[str]:
        return list(self._dtypes)

    def remove(self) -> None:
        """Close and delete the files; may be called again."""
        for column, handle in self._files.items():
            os.close(handle)
            self._paths[column].unlink(missing_ok=True)
        self._files = {}
