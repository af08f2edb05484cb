"""Finding and opening input files: folders, globs, plain or compressed, by their suffix or their first bytes."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from turbogr.errors import UserError, did_you_mean

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_UNREADABLE = {".xz": "xz", ".zip": "zip"}
_FIRST_BYTES = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{b"BZh%d1AY&SY" % level: "bz2" for level in range(1, 10)},
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "parquet",
}


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
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise UserError(f"{path} is no regular file; the log may be read more than once, so write it to one first")
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
            if not matches:
                beside = os.listdir(path.parent) if path.parent.is_dir() else []
                raise UserError(f"{path} does not exist.{did_you_mean(path.name, beside)}")
            found += matches
    refuse_repeated(found)
    return found


def refuse_repeated(files: Sequence[Path]) -> None:
    """Raise UserError where a file is named twice, by whatever path: it is unclear whether its records count twice."""
    seen: dict[str, Path] = {}
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            also = "" if seen[real] == file else f" (also as {seen[real]})"
            raise UserError(f"{file} is named twice{also}; name every file once")
        seen[real] = file


def partition_root(path: Path) -> Path:
    """Return the folder below which key=value folders of a path that was given are partitions of the data.

    That is the folder itself, or the fixed beginning of a glob; a single file lies in no partition.
    """
    if path.is_dir():
        return path
    if path.exists():
        return path.parent
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
    return Path(*fixed)


def _fits(file: Path, suffixes: tuple[str, ...]) -> bool:
    return Path(plain_name(file)).suffix.lower() in suffixes


def _hidden(file: Path, folder: Path) -> bool:
    """Whether the name marks the file as no data, as engines do (_SUCCESS, _metadata, .crc and the like)."""
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def read_pieces(path: Path, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed content in pieces of about `size` bytes, each with the bytes of the file that it took.

    Raises:
        UserError: the file cannot be read, or its compression is broken or cut short.
    """
    compression = _COMPRESSIONS.get(path.suffix.lower()) or _compression_of(path)
    try:
        with pa.OSFile(os.fsencode(path), "rb") as file:
            stream = pa.CompressedInputStream(file, compression) if compression else file
            done = 0
            while piece := stream.read(size):
                yield piece, file.tell() - done
                done = file.tell()
    except OSError as error:
        what = f" or its {compression} data damaged" if compression else ""
        raise UserError(f"cannot read {path}: {error.strerror or error} (is it cut short{what}?)") from error


def _compression_of(path: Path) -> str | None:
    """Recognise a compression by the first bytes; raises UserError for one that cannot be read here."""
    try:
        with open(path, "rb") as file:
            start = file.read(max(map(len, _FIRST_BYTES)))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    kind = next((kind for first, kind in _FIRST_BYTES.items() if start.startswith(first)), None)
    if kind == "parquet":
        raise UserError(f"{path} is a Parquet file; read it with the source 'parquet'")
    if kind in _UNREADABLE.values():
        raise UserError(f"{path} is {kind}-compressed, which is not read here; unpack it, or use gzip or zstd")
    return kind


def plain_name(path: Path) -> str:
    """Return the file's name without the suffix of a compression, also of one that will be refused."""
    return path.name.removesuffix(path.suffix) if path.suffix.lower() in {**_COMPRESSIONS, **_UNREADABLE} else path.name
