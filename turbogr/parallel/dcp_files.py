"""Reading the tensors of checkpoints that earlier releases wrote with PyTorch's distributed checkpoint (DCP).

DCP's `.metadata` is a pickle, which may run any code when it is loaded the usual way. Here it is read by an unpickler
that knows the few names that DCP writes, and makes plain values of them; no class or function of any module is called.
The tensors themselves are read by `torch.load` with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *((_DCP, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_DCP, name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
}


class _Plain:
    """What stands for an object of the pickle: what it was made with, and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return _Plain
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it asks for {module!r}.{name!r}, which no checkpoint needs and which may run code. It is not opened"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


@dataclass(frozen=True)
class StoredChunk:
    """Rows of a tensor from row `first` on: `length` bytes at `offset` of a file, which `torch.save` wrote."""

    first: int
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor of a checkpoint: its type, its whole shape, and the chunks that hold its rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def read_metadata(folder: Path) -> dict[str, ChunkedTensor]:
    """Return the tensors of the checkpoint in `folder` by name.

    Raises:
        ValueError: the metadata is damaged, or asks for code.
        OSError: it cannot be read.
    """
    try:
        metadata = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        stored = {(_name(index.fqn), _ints(index.offset)): info for index, info in metadata.storage_data.items()}
        return {
            _name(name): _tensor(name, entry, stored)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _tensor(name: str, entry: Any, stored: dict[tuple[str, tuple[int, ...]], Any]) -> ChunkedTensor:
    chunks = []
    for chunk in entry.chunks:
        offsets, sizes, info = _ints(chunk.offsets), _ints(chunk.sizes), stored[name, _ints(chunk.offsets)]
        if any(offsets[1:]):
            raise ValueError(f"{name} is cut along its columns")
        file, (offset, length) = _name(info.relative_path), _ints((info.offset, info.length))
        if Path(file).name != file:
            raise ValueError(f"{name} is said to be in {file!r}, which is not a file of the folder")
        chunks.append(StoredChunk(offsets[0] if offsets else 0, sizes, file, offset, length))
    dtype = entry.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no type")
    return ChunkedTensor(dtype, _ints(entry.size), tuple(chunks))


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a name")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if not all(isinstance(value, int) and value >= 0 for value in found):
        raise ValueError(f"{found} are not sizes")
    return found


def read_chunk(folder: Path, chunk: StoredChunk) -> Tensor:
    """Read the rows of a chunk.

    Raises:
        ValueError, RuntimeError, pickle.UnpicklingError: the file is damaged.
        OSError: it cannot be read.
    """
    tensor = torch.load(io.BytesIO(_bytes_of(folder, chunk)), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes:
        raise ValueError(f"{chunk.file} does not hold what its list says")
    return tensor


def damaged_files(folder: Path) -> list[str]:
    """Return sentences about files whose tensors do not match the CRC-32 that torch stored with them.

    Their headers have no checksums.
    """
    sentences = {}
    for tensor in read_metadata(folder).values():
        for chunk in tensor.chunks:
            try:
                damaged = zipfile.ZipFile(io.BytesIO(_bytes_of(folder, chunk))).testzip() is not None
            except FileNotFoundError:
                sentences[chunk.file] = f"{chunk.file} is missing"
                continue
            except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError):
                damaged = True
            if damaged:
                sentences[chunk.file] = f"{chunk.file} is not what was written"
    return [sentences[file] for file in sorted(sentences)]


def _bytes_of(folder: Path, chunk: StoredChunk) -> bytes:
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.offset)
        return file.read(chunk.length)
