"""One file of tensors in the safetensors format: a JSON header, then the bytes of every tensor one behind the other.

The format holds no code, and any safetensors library reads it. We write and read it here because a file is written in
one pass, with its checksum and without a copy, and a rank reads its own rows of a table straight into their place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbogr.checksums import BLOCK, FileChecksum

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER_BYTES = 100 << 20  # as the safetensors library allows


def dtype_name(dtype: torch.dtype) -> str:
    """Return what the format calls a type."""
    return _NAMES[dtype]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileChecksum:
    """Write tensors in host memory to the new file `path`, flush it to the disk and return its checksum.

    Raises:
        OSError: the disk is full or not writable, or the file exists.
    """
    checksum = FileChecksum()
    with path.open("xb", buffering=0) as file:
        for data in (_header(tensors), *map(_bytes_of, tensors.values())):
            for start in range(0, len(data), BLOCK):
                piece = data[start : start + BLOCK]
                checksum.update(piece)
                while len(piece):
                    piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    return checksum


def _header(tensors: Mapping[str, Tensor]) -> memoryview:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class StoredTensor:
    """Where a file has a tensor: `start` is its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
        ValueError, KeyError, TypeError: the file is not in the format.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"{path.name} has no safetensors header")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        dtype, shape = DTYPES[entry["dtype"]], tuple(int(extent) for extent in entry["shape"])
        first, end = entry["data_offsets"]
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        if not (min(shape, default=1) >= 0 and first >= 0 and end - first == num_bytes and 8 + length + end <= size):
            raise ValueError(f"{path.name} does not hold all of {name}")
        found[name] = StoredTensor(dtype, shape, 8 + length + first)
    return found


def read_rows(path: Path, stored: StoredTensor, first: int, target: Tensor) -> None:
    """Read rows from row `first` on of a stored tensor into `target`, which has as many; a scalar has one row.

    Raises:
        OSError, ValueError: the file cannot be read, or ends early.
    """
    if not target.numel():
        return
    direct = target.dtype == stored.dtype and target.device.type == "cpu" and target.is_contiguous()
    rows = target.detach() if direct else torch.empty(target.shape, dtype=stored.dtype)
    data = _bytes_of(rows)
    with path.open("rb", buffering=0) as file:
        file.seek(stored.start + first * (len(data) // max(len(target) if target.dim() else 1, 1)))
        while len(data):
            read = file.readinto(data[:BLOCK])
            if not read:
                raise ValueError(f"{path.name} ends early")
            data = data[read:]
    if not direct:
        target.detach().copy_(rows)
