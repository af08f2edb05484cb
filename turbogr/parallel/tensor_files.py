"""Save tensors to a folder and load them, on any number of ranks.

Every rank that has something to save writes a part: `part-N.safetensors` with its tensors and its rows of the sharded
tables, and then `part-N.json`, which lists them and has the checksums of both files. Sharded tables are passed as
DTensors (`ShardedTable.for_checkpoint`); plain tensors are equal on all ranks, and rank 0 writes them. A part names the
rows that it has, so a checkpoint can be loaded on any number of ranks. Nothing that is read can run code.

Earlier releases wrote the files of PyTorch's distributed checkpoint; these are read too (`dcp_files.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from turbogr import __version__
from turbogr.checksums import Damaged, FileChecksum, sealed, unsealed
from turbogr.errors import UserError
from turbogr.files import replace_text
from turbogr.parallel import dcp_files, safetensors_file
from turbogr.parallel.safetensors_file import StoredTensor

FORMAT = 1
"""Of part-N.json. A release whose parts an earlier one cannot read raises it."""

_REMEDY = "It is damaged or belongs to another model; remove the folder to use an earlier one"


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor that is `shape` as a whole, from row `first` on; a tensor without dimensions has one row.

    `is_copy`: nobody else changes these rows.
    """

    rows: Tensor
    shape: tuple[int, ...]
    first: int = 0
    is_copy: bool = False


def own_rows(state: Mapping[str, Any], rank: int) -> dict[str, Rows]:
    """Return what a rank writes of nested dicts of tensors, by name: rank 0 all that is plain, and rows of tables."""
    return {
        name: part
        for name, part in _rows_of(state).items()
        if (rank == 0 if part.device_coordinate is None else part.device_coordinate[0] == 0)
    }


@dataclass(frozen=True)
class _Placed(Rows):
    """`Rows` of a rank whose place in the mesh is (group, member), None for a plain tensor."""

    device_coordinate: tuple[int, ...] | None = None


def _rows_of(state: Mapping[str, Any], prefix: str = "") -> dict[str, _Placed]:
    found: dict[str, _Placed] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= _rows_of(value, f"{prefix}{key}.")
        elif isinstance(value, DTensor):
            place, members = value.device_mesh.get_coordinate(), value.device_mesh.size(1)
            assert place is not None and value.dim(), "tables are sharded over the ranks of a mesh, groups x members"
            chunk = -(-value.shape[0] // members)
            first = min(place[1] * chunk, value.shape[0])
            found[f"{prefix}{key}"] = _Placed(value.to_local(), tuple(value.shape), first, members > 1, tuple(place))
        else:
            assert isinstance(value, Tensor), (prefix, key, type(value))
            found[f"{prefix}{key}"] = _Placed(value, tuple(value.shape))
    return found


def write_part(parts: Mapping[str, Rows], folder: Path, number: int, num_parts: int) -> None:
    """Write what this rank has (`own_rows`, in host memory) into `folder` and flush it to the disk.

    Raises:
        OSError: the disk is full or not writable; it names a path in `folder`.
    """
    path = folder / f"part-{number}.safetensors"
    try:
        checksum = safetensors_file.write_tensors(path, {name: part.rows for name, part in parts.items()})
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    tensors = {
        name: {
            "dtype": safetensors_file.dtype_name(part.rows.dtype),
            "shape": list(part.shape),
            "first": part.first,
            "rows": len(part.rows) if part.shape else 1,
        }
        for name, part in parts.items()
    }
    record = {
        "format": FORMAT,
        "turbogr": __version__,
        "part": number,
        "parts": num_parts,
        "file": checksum.to_record(),
    }
    replace_text(folder / f"part-{number}.json", sealed({**record, "tensors": tensors}))


def save_tensors(state: Mapping[str, Any], folder: Path) -> None:
    """Write nested dicts of tensors of a single process into the folder `folder`, which is made."""
    folder.mkdir()
    write_part(own_rows(state, 0), folder, 0, 1)


def missing_parts(folder: Path, num_parts: int) -> list[str]:
    """Return the files of the parts that are not all there."""
    names = (f"part-{number}.{ending}" for number in range(num_parts) for ending in ("safetensors", "json"))
    return [name for name in names if not (folder / name).exists()]


def load_tensors(state: Mapping[str, Any], folder: Path) -> None:
    """Load into the tensors of `state`, in place; `state` may be a part of what was saved.

    Raises:
        UserError: a tensor is missing in the folder, has another shape, or the folder is damaged.
    """
    try:
        stored = _stored(folder)
        for name, target in _rows_of(state).items():
            if name not in stored:
                raise ValueError(f"it has no {name}")
            _load(stored[name], target, name)
    except Damaged:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the checkpoint {folder}: {reason}. {_REMEDY}") from error


def stored_names(folder: Path) -> set[str]:
    """Return the names of the tensors in the checkpoint in `folder`.

    Raises:
        UserError: the folder has no list of its tensors, or a damaged one.
    """
    try:
        return set(_stored(folder))
    except Damaged:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the checkpoint {folder}: {reason}. {_REMEDY}") from error


def has_checksums(folder: Path) -> bool:
    """Whether the checkpoint in `folder` has checksums; those of earlier releases have none."""
    return not (folder / dcp_files.METADATA).exists()


def damages(folder: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return a sentence for each damaged file of the checkpoint in `folder`.

    All bytes of all tensor files are read, or with `share` (k, n) those of each n-th file from the k-th on; the lists
    of tensors are read by all. Of checkpoints of earlier releases, what torch stored checksums of is checked.
    """
    try:
        if not has_checksums(folder):
            return dcp_files.damaged_files(folder) if share[0] == 0 else []
        lists = _part_lists(folder)
        sentences = [
            f"{folder / _file_of(number)} {damage}"
            for number, part in enumerate(lists)
            if number % share[1] == share[0]
            if (damage := FileChecksum.from_record(part["file"]).damage(folder / _file_of(number)))
        ]
        return sentences or ([] if _stored(folder) else [f"{folder} lists no tensors"])
    except UserError as error:
        return [str(error)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{folder} cannot be read: {' '.join(str(error).split())[:300]}"]


def _file_of(number: int) -> str:
    return f"part-{number}.safetensors"


@dataclass(frozen=True)
class _Stored:
    """A tensor of a checkpoint: its shape, and what has its rows, sorted by the first one."""

    shape: tuple[int, ...]
    pieces: Sequence[_Piece]


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor from row `first` on, in a file of ours (`own`) or of DCP (`chunk`)."""

    first: int
    num_rows: int
    path: Path
    own: StoredTensor | None = None
    chunk: dcp_files.StoredChunk | None = None

    def read(self, first: int, target: Tensor) -> None:
        """Read rows from row `first` of this piece on into `target`."""
        if self.own is not None:
            safetensors_file.read_rows(self.path, self.own, first, target)
            return
        assert self.chunk is not None
        rows = dcp_files.read_chunk(self.path.parent, self.chunk)
        target.detach().copy_(rows[first : first + len(target)] if rows.dim() else rows)


def _stored(folder: Path) -> dict[str, _Stored]:
    if not has_checksums(folder):
        return {
            name: _Stored(
                tensor.shape,
                [
                    _Piece(chunk.first, chunk.sizes[0] if chunk.sizes else 1, folder / chunk.file, chunk=chunk)
                    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.first)
                ],
            )
            for name, tensor in dcp_files.read_metadata(folder).items()
        }
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[_Piece]] = {}
    for number, part in enumerate(_part_lists(folder)):
        path = folder / _file_of(number)
        header = safetensors_file.read_header(path)
        for name, entry in part["tensors"].items():
            shape = tuple(entry["shape"])
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"its parts do not agree about the shape of {name}")
            expected = (entry["rows"], *shape[1:]) if shape else ()
            if name not in header or header[name].shape != expected:
                raise ValueError(f"{path.name} does not hold what its list says of {name}")
            pieces.setdefault(name, []).append(_Piece(entry["first"], entry["rows"], path, own=header[name]))
    return {name: _Stored(shapes[name], sorted(found, key=lambda piece: piece.first)) for name, found in pieces.items()}


def _part_lists(folder: Path) -> list[dict[str, Any]]:
    """Read part-N.json of all parts.

    Raises:
        UserError: one is missing, damaged or of a later release.
    """
    found: list[dict[str, Any]] = []
    num_parts = 1
    while len(found) < num_parts:
        path = folder / f"part-{len(found)}.json"
        try:
            part = unsealed(path.read_bytes(), str(path))
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(
                f"{path.name} is missing in the checkpoint {folder}: it was removed, or a rank has written it to "
                "another machine's disk. Copy it here, or remove the folder to use an earlier checkpoint"
            ) from None
        if part.get("format") != FORMAT:
            raise UserError(
                f"{path} was written by a later release of turbogr ({part.get('turbogr')}), and this release cannot "
                "read it; update turbogr"
            )
        num_parts = part["parts"]
        if part["part"] != len(found) or not isinstance(num_parts, int):
            raise Damaged(f"{path} is the list of another part; copy the folder again")
        found.append(part)
    return found


def _load(stored: _Stored, target: Rows, name: str) -> None:
    if stored.shape != target.shape:
        raise ValueError(f"{name} has the shape {list(stored.shape)} there, and {list(target.shape)} in this model")
    begin, end = target.first, target.first + (len(target.rows) if target.shape else 1)
    for piece in stored.pieces:
        first, last = max(begin, piece.first), min(end, piece.first + piece.num_rows)
        if first < last and first == begin:
            rows = target.rows[first - target.first : last - target.first] if target.shape else target.rows
            piece.read(first - piece.first, rows)
            begin = last
    if begin < end:
        raise ValueError(f"row {begin:,} of {name} is in none of its files")
