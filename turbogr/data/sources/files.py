"""Finding and opening input files: folders, globs, plain, gzip and zstd."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from turbogr.errors import UserError, nearest

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}


def find_files(paths: Sequence[Path | str], suffixes: tuple[str, ...], what: str) -> list[Path]:
    """Expand files, folders (searched deeply for `suffixes`, compressed or not) and globs; sorted within each path.

    Raises:
        UserError: no path was given, one does not exist, or nothing in it fits.
    """
    if not paths:
        raise UserError(f"name the {what} to read: turbogr prepare SOURCE PATH... --out DIR")
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(
                file for file in path.rglob("*") if file.is_file() and _fits(file, suffixes) and not _hidden(file, path)
            )
            if not inside:
                raise UserError(f"{path} holds no {what} ({', '.join('*' + suffix for suffix in suffixes)})")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
            if not matches:
                beside = os.listdir(path.parent) if path.parent.is_dir() else []
                raise UserError(f"{path} does not exist.{nearest(path.name, beside)}")
            found += matches
    return list(dict.fromkeys(found))


def _fits(file: Path, suffixes: tuple[str, ...]) -> bool:
    plain = file.with_suffix("") if file.suffix.lower() in _COMPRESSIONS else file
    return plain.suffix.lower() in suffixes


def _hidden(file: Path, folder: Path) -> bool:
    """Whether engines mark the file as none of the data (_SUCCESS, _metadata, .crc and the like)."""
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed by its suffix."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    try:
        if compression is None:
            return open(path, "rb")
        return cast(BinaryIO, pa.CompressedInputStream(pa.OSFile(str(path), "rb"), compression))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def read_pieces(path: Path, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed content in pieces of about `size` bytes and how far the file itself has been read.

    Raises:
        UserError: the file cannot be read, or its compression is broken or cut short.
    """
    with open_file(path) as file:
        decompressed = path.suffix.lower() in _COMPRESSIONS
        while True:
            try:
                piece = file.read(size)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"cannot read {path}: the file is damaged or cut short ({error})") from error
            if not piece:
                return
            # A compressed stream does not tell its place; its progress is known to be complete only at the end.
            yield piece, 0 if decompressed else len(piece)
